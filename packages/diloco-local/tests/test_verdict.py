import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_local._verdict import Stop, verdict
from diloco_protocol import Outcome, Reason, ReplicaState


def outcome(code=0, *, name=None, reason=None, finished_at=50.0, error=None):
    return Outcome(
        exit_code=code,
        signal=name,
        error=error,
        reason=reason or (Reason.COMPLETED if code == 0 else Reason.ERROR),
        started_at=1.0,
        finished_at=finished_at,
    )


outcomes = (
    st.none()
    | st.builds(
        lambda code, reason, end: outcome(code, reason=reason if code else None, finished_at=end),
        st.integers(0, 255),
        st.sampled_from([Reason.ERROR, Reason.TIMEOUT]),
        st.floats(1, 100),
    )
    | st.sampled_from(
        [outcome(137, name="SIGKILL"), outcome(143, name="SIGTERM", finished_at=70.0)]
    )
)
stops = st.none() | st.builds(
    Stop,
    st.sampled_from([Reason.CANCEL_REQUESTED, Reason.STOPPED_EXTERNALLY, Reason.TIMEOUT]),
    st.floats(1, 100),
)
statuses = st.none() | st.sampled_from([0, 256, 9, 15, 11])


@given(outcomes, statuses, stops, st.booleans(), st.integers(1, 5))
def test_laws(reported, wait_status, stop, oom, attempt):
    status = verdict(attempt=attempt, outcome=reported, wait_status=wait_status, stop=stop, oom=oom)
    assert status.state.terminal
    assert not status.stopping
    assert status.attempt == attempt
    # Success is what the runner reported as success, and nothing else.
    assert (status.state is ReplicaState.SUCCEEDED) == (
        reported is not None and reported.exit_code == 0
    )
    # Cancelled needs an order to end it.
    if status.state is ReplicaState.CANCELLED:
        assert stop is not None
        assert status.reason is stop.reason
    if status.reason is Reason.OOM:
        assert oom
        assert status.signal == "SIGKILL"
        assert stop is None or reported.finished_at < stop.at
    if (
        stop is None
        and reported is not None
        and reported.reason == Reason.TIMEOUT
        and reported.exit_code
    ):
        assert status.reason is Reason.TIMEOUT


def test_a_kill_from_outside_is_a_failure_with_its_signal():
    status = verdict(attempt=1, outcome=None, wait_status=signal.SIGKILL, stop=None)
    assert (status.state, status.signal, status.exit_code) == (ReplicaState.FAILED, "SIGKILL", 137)
    assert status.reason is Reason.ERROR


def test_a_kill_after_a_cancel_is_a_cancel():
    stop = Stop(Reason.CANCEL_REQUESTED, 40.0)
    status = verdict(
        attempt=1, outcome=outcome(137, name="SIGKILL"), wait_status=137 << 8, stop=stop
    )
    assert (status.state, status.exit_code) == (ReplicaState.CANCELLED, 137)


def test_a_failure_that_won_the_race_stays():
    stop = Stop(Reason.CANCEL_REQUESTED, 60.0)
    status = verdict(attempt=1, outcome=outcome(1, error="boom"), wait_status=256, stop=stop)
    assert (status.state, status.message) == (ReplicaState.FAILED, "boom")


def test_a_success_that_won_the_race_stays():
    stop = Stop(Reason.CANCEL_REQUESTED, 10.0)
    assert (
        verdict(attempt=1, outcome=outcome(), wait_status=0, stop=stop).state
        is ReplicaState.SUCCEEDED
    )


def test_exit_0_without_an_outcome_is_no_success():
    assert verdict(attempt=1, outcome=None, wait_status=0, stop=None).state is ReplicaState.FAILED


def test_nothing_known_is_said():
    status = verdict(attempt=1, outcome=None, wait_status=None, stop=None)
    assert (status.state, status.reason, status.exit_code) == (
        ReplicaState.FAILED,
        Reason.PLATFORM,
        None,
    )


@pytest.mark.parametrize("reason", [Reason.CANCEL_REQUESTED, Reason.STOPPED_EXTERNALLY])
def test_a_clock_that_is_set_back_does_not_make_an_order_somebody_elses(reason):
    told = outcome(143, name="SIGTERM", reason=Reason.CANCEL_REQUESTED, finished_at=10.0)
    status = verdict(attempt=1, outcome=told, wait_status=None, stop=Stop(reason, 60.0))
    assert (status.state, status.reason) == (ReplicaState.CANCELLED, reason)

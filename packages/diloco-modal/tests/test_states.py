"""What is made of the record and of a call's answer: pure functions."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_modal._state._record import DamagedRecordError
from diloco_modal._state._states import End, Lost, Trace, died, ended, living, stopped, with_damage
from diloco_modal._state._states import trace_of as trace_of_texts
from diloco_protocol import Outcome, Reason, ReplicaState

URL = "https://modal.com/id/fc-1"
EXECUTOR, OUTSIDE = {"by": "executor", "at": 100.0}, {"by": "outside", "at": 100.0}
LIFE = {"attempt": 1, "at": 10.0}
END = {"started": 1, "failed": 0, "at": 50.0}


def trace_of(entries, rank, **more):
    return trace_of_texts({key: json.dumps(value) for key, value in entries.items()}, rank, **more)


def reported(text, trace, url):
    return ended(End("SUCCESS", text), trace, url)


def told(status):
    return status.state.value, status.reason, status.attempt, status.stopping


def lives(*ends, **more):
    """A record of rank 3 with so many lives; None for one that has no end."""
    entries = {"launch": {}, "life-1-1": {"attempt": 9, "at": 0.0}, **more}
    for number, end in enumerate(ends, 1):
        entries[f"life-3-{number}"] = {"attempt": number, "at": 10.0 * number}
        if end is not None:
            entries[f"end-3-{number}"] = end
    return entries


class TestTrace:
    def test_of_a_rank_without_a_container(self):
        assert trace_of(lives(), 3) == Trace()
        more = {"cancel-3": EXECUTOR, "over-3": {"at": 7.0}, "cancel-1": OUTSIDE}
        assert trace_of(lives(**more), 3) == Trace(cancel=EXECUTOR, ended_at=7.0)

    def test_the_newest_life_counts(self):
        trace = trace_of(lives(END, None), 3)
        assert trace == Trace(2, 20.0, open=True, lives=2)
        end = {"started": 2, "failed": 1, "at": 60.0, "again": True}
        assert trace_of(lives(END, end), 3) == Trace(2, 20.0, lives=2, ended_at=60.0, again=True)

    def test_of_a_life_that_nobody_has_ended_whoever_looks_first_tells_the_end(self):
        assert trace_of(lives(None, **{"over-3": {"at": 70.0}}), 3).ended_at == 70.0
        assert trace_of(lives(END, **{"over-3": {"at": 70.0}}), 3).ended_at == 50.0

    def test_attempts_within_a_life(self):
        again = {"attempt-3-2": {"at": 12.0}, "attempt-3-3": {"at": 14.0}}
        assert trace_of(lives(None, **again), 3) == Trace(3, 14.0, open=True, lives=1)
        # The runner counts better than what was written down meanwhile.
        end = {"started": 4, "failed": 3, "at": 50.0, "again": False}
        assert trace_of(lives(end, **again), 3).attempt == 4

    @pytest.mark.parametrize(
        ("options", "waited"),
        [
            ({"lives": 0, "cancel": EXECUTOR, "ended_at": 50.0}, False),
            ({"open": True, "cancel": EXECUTOR, "ended_at": 50.0}, False),
            ({"cancel": EXECUTOR, "ended_at": 50.0}, True),
            ({"cancel": EXECUTOR, "ended_at": 100.0}, True),
            ({"cancel": EXECUTOR, "ended_at": 100.5}, False),
            ({"cancel": OUTSIDE, "ended_at": 50.0}, False),
            ({"cancel": EXECUTOR, "ended_at": 100.5, "again": True}, True),
            ({"cancel": EXECUTOR, "ended_at": 50.0, "again": False}, False),
            ({"cancel": OUTSIDE, "ended_at": 50.0, "again": True}, True),
        ],
    )
    def test_whether_the_next_attempt_waited(self, options, waited):
        assert Trace(**{"lives": 1, **options}).waited is waited


class TestLiving:
    @pytest.mark.parametrize(
        ("trace", "words"),
        [
            (Trace(), ("pending", Reason.QUEUED, 1, False)),
            (Trace(cancel=EXECUTOR), ("pending", Reason.CANCEL_REQUESTED, 1, True)),
            (Trace(2, lives=2, open=True), ("running", None, 2, False)),
            (Trace(2, lives=2), ("pending", Reason.PREEMPTED, 3, False)),
            (Trace(2, lives=2, again=True), ("pending", Reason.PREEMPTED, 3, False)),
            (Trace(2, lives=2, again=False), ("running", None, 2, False)),
            (Trace(2, lives=2, cancel=OUTSIDE), ("pending", Reason.STOPPED_EXTERNALLY, 3, True)),
        ],
    )
    def test_states(self, trace, words):
        status = living(trace, URL)
        assert told(status) == words
        assert (status.url, status.finished_at) == (URL, None)

    def test_only_what_runs_has_a_start(self):
        assert living(Trace(1, 10.0, open=True, lives=1), URL).started_at == 10.0
        assert living(Trace(1, 10.0, lives=1), URL).started_at is None


class TestStopped:
    OPEN = Trace(1, 10.0, open=True, lives=1, cancel=EXECUTOR)

    @pytest.mark.parametrize(
        ("now", "state"), [(100.0, "running"), (139.9, "running"), (140.0, "cancelled")]
    )
    def test_while_its_container_may_be_there_it_is_stopping(self, now, state):
        """For Modal's 30 seconds and the grace of the runner."""
        status = stopped(self.OPEN, URL, now, 10.0)
        assert told(status)[::3] == (state, state == "running")

    def test_who_has_no_time_of_the_cancel_waits(self):
        trace = Trace(1, 10.0, open=True, lives=1)
        assert stopped(trace, URL, 1e9, 10.0).state is ReplicaState.RUNNING

    def test_without_an_open_life_there_is_nothing_to_wait_for(self):
        assert told(stopped(Trace(cancel=EXECUTOR), URL, 100.0, 10.0))[0] == "cancelled"

    @pytest.mark.parametrize(
        ("cancel", "reason", "said"),
        [
            (EXECUTOR, Reason.CANCEL_REQUESTED, "cancelled"),
            (OUTSIDE, Reason.STOPPED_EXTERNALLY, "the call was stopped from outside"),
        ],
    )
    def test_whose_stop_it_was(self, cancel, reason, said):
        trace = Trace(2, 10.0, lives=2, ended_at=105.0, cancel=cancel, again=False)
        status = stopped(trace, URL, 200.0, 10.0)
        assert told(status) == ("cancelled", reason, 2, False)
        assert (status.message, status.started_at, status.finished_at) == (said, 10.0, 105.0)

    def test_who_waited_has_ended_when_it_was_stopped(self):
        trace = Trace(2, 10.0, lives=2, ended_at=50.0, cancel=OUTSIDE, again=True)
        status = stopped(trace, URL, 200.0, 10.0)
        assert (status.attempt, status.started_at, status.finished_at) == (3, None, 100.0)


class TestReported:
    TRACE = Trace(2, 10.0, lives=2, ended_at=50.0)

    def test_the_runner_knows_times_and_attempt_best(self):
        text = Outcome(0, result=[1], started_at=20.0, finished_at=40.0, attempt=3).to_json()
        status, result = reported(text, self.TRACE, URL)
        assert told(status) == ("succeeded", Reason.COMPLETED, 3, False)
        assert (status.started_at, status.finished_at, status.exit_code) == (20.0, 40.0, 0)
        assert result == [1]

    def test_what_it_does_not_say_is_in_the_record(self):
        status, _ = reported(Outcome(3, error="no data").to_json(), self.TRACE, URL)
        assert told(status) == ("failed", Reason.ERROR, 2, False)
        assert (status.started_at, status.finished_at) == (10.0, 50.0)
        assert (status.exit_code, status.message) == (3, "no data")

    @pytest.mark.parametrize(
        ("cancel", "state", "reason"),
        [
            (EXECUTOR, "cancelled", Reason.CANCEL_REQUESTED),
            (OUTSIDE, "cancelled", Reason.STOPPED_EXTERNALLY),
            (None, "failed", Reason.PLATFORM),
        ],
    )
    def test_a_runner_that_was_told_to_stop(self, cancel, state, reason):
        """Without a cancel nobody knows who told it."""
        text = Outcome(143, signal="SIGTERM", reason=Reason.CANCEL_REQUESTED).to_json()
        trace = Trace(1, 10.0, lives=1, cancel=cancel)
        status, result = reported(text, trace, URL)
        assert told(status)[:2] == (state, reason)
        assert (status.exit_code, status.signal, result) == (143, "SIGTERM", None)

    @given(
        st.text()
        | st.sampled_from(["[" * 100_000, "9" * 5000, '{"exit_code": 1e999}', '"\\ud800"'])
        | st.dictionaries(
            st.sampled_from(["exit_code", "result", "version", "attempt", "reason", "started_at"]),
            st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just([]),
        ).map(json.dumps)
    )
    def test_whatever_was_returned_is_data(self, value):
        status, _ = reported(value, Trace(), URL)
        assert status.state.terminal
        assert (status.exit_code == 0) == (status.state is ReplicaState.SUCCEEDED)

    @pytest.mark.parametrize("code", [0, 3])
    def test_what_cannot_be_read_is_what_the_record_says_of_it(self, code):
        outcome = Outcome(code, error="no data" if code else "its result was long")
        trace = Trace(1, 10.0, lives=1, ended_at=50.0, outcome=outcome.to_json())
        status, result = ended(End("SUCCESS", message="it is too large"), trace, URL)
        assert (status.state, status.exit_code) == ("failed" if code else "succeeded", code)
        if code:
            assert result is None
        else:
            assert isinstance(result, Lost)
            assert result.why.endswith("from what the call returned: it is too large")

    def test_a_result_that_the_record_has_is_not_lost(self):
        trace = Trace(1, 10.0, lives=1, ended_at=50.0, outcome=Outcome(0, result=7).to_json())
        status, result = ended(End("SUCCESS", message="it is too large"), trace, URL)
        assert (status.state, result) == ("succeeded", 7)

    def test_nobody_believes_in_a_success_that_was_not_reported(self):
        status, _ = ended(End("SUCCESS", message="it is too large"), Trace(), URL)
        assert told(status) == ("failed", Reason.START_FAILED, 1, False)
        assert "it is too large; deploy the app" in status.message


class TestDied:
    TRACE = Trace(2, 10.0, lives=2, ended_at=50.0)

    @pytest.mark.parametrize(
        ("end", "reason", "code", "signal"),
        [
            (End("TIMEOUT", message="late"), Reason.TIMEOUT, 124, None),
            (End("INTERNAL_FAILURE", message="broken"), Reason.PLATFORM, None, None),
            (End("FAILURE", message="Out of Memory"), Reason.OOM, 137, "SIGKILL"),
            (End("FAILURE", message="OOM killed"), Reason.OOM, 137, "SIGKILL"),
            (End("FAILURE", message="the task was OOMKilled"), Reason.OOM, 137, "SIGKILL"),
            (End("KERNEL_OOM_KILL"), Reason.OOM, 137, "SIGKILL"),
            (End("FAILURE", message="no room for bloom"), Reason.PLATFORM, None, None),
            (End("IDLE_TIMEOUT"), Reason.PLATFORM, None, None),
            (End("STATUS_99"), Reason.PLATFORM, None, None),
            (End("INIT_FAILURE", message="no x", raised=True), Reason.START_FAILED, None, None),
            (End("FAILURE", message="oom", raised=True), Reason.START_FAILED, None, None),
        ],
    )
    def test_why(self, end, reason, code, signal):
        status = died(end, self.TRACE, URL)
        assert told(status) == ("failed", reason, 2, False)
        assert (status.exit_code, status.signal) == (code, signal)
        assert (status.started_at, status.finished_at, status.url) == (10.0, 50.0, URL)
        assert status.message == end.message or end.status


class TestDamage:
    WRONG = {"at": -1}

    def test_the_rest_of_a_record_counts(self):
        entries = lives(END, None, **{"cancel-3": EXECUTOR, "over-3": {"at": 70.0}})
        for key in ("life-3-2", "cancel-3", "over-3"):
            damaged = {**entries, key: self.WRONG}
            with pytest.raises(DamagedRecordError, match=key):
                trace_of(damaged, 3)
            trace = trace_of(damaged, 3, damage="wrong")
            assert (trace.lives, trace.attempt, trace.open) == (2, 2, True)
            assert (trace.started_at is None) == (key == "life-3-2")
            assert (trace.cancel is None) == (key == "cancel-3")
            assert (trace.ended_at is None) == (key == "over-3")
        trace = trace_of({"end-3-7": END, **entries}, 3, damage="wrong")
        assert (trace.attempt, trace.damage) == (2, "wrong")

    def test_is_said(self):
        trace = Trace(damage="the entry is wrong")
        assert with_damage(living(trace, URL), trace).message == "the entry is wrong"
        both = with_damage(died(End("FAILURE", message="killed"), trace, URL), trace)
        assert both.message == "killed. the entry is wrong"
        assert with_damage(living(Trace(), URL), Trace()).message == ""

    @pytest.mark.parametrize("attempt", [2**31, 2**40, -1, 0])
    def test_attempts_that_cannot_be(self, attempt):
        with pytest.raises(DamagedRecordError):
            trace_of({"life-3-1": {"attempt": attempt, "at": 1.0}}, 3)

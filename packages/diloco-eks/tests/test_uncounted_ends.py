"""What a rank had come to by itself when another one ended the run, from its pod alone."""

from datetime import datetime, timedelta

import pytest

from diloco_eks._state._ends import uncounted_failure
from diloco_eks._state._reading import read_job, read_pod
from diloco_eks._state._states import map_states
from diloco_protocol import Reason

ENDED = {
    "type": "Failed",
    "status": "True",
    "reason": "MaxFailedIndexesExceeded",
    "lastTransitionTime": "2026-11-21T04:40:00Z",
}
EVICTED = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}


@pytest.fixture
def job(a_job):
    job = a_job(2, {"failedIndexes": "0", "conditions": [ENDED]})
    job["metadata"]["annotations"]["diloco.dev/timeout"] = "100"
    return read_job(job)


def pod_that_ended(a_pod, code=0, message="", told=None, at="04:30:30", grace=5, **values):
    """A pod whose container ended at a time; ``told`` is when it was told to, if it was."""
    start, end = "2026-11-21T04:30:00Z", f"2026-11-21T{at}Z"
    state = {"exitCode": code, "startedAt": start, "finishedAt": end, "message": message}
    pod = a_pod(1, "Succeeded" if code == 0 else "Failed", {"terminated": state}, **values)
    if told is not None:
        over = datetime.fromisoformat(f"2026-11-21T{told}Z") + timedelta(seconds=grace)
        pod["metadata"] |= {
            "deletionTimestamp": over.isoformat(),
            "deletionGracePeriodSeconds": grace,
        }
    return read_pod(pod)


def test_a_pod_that_was_taken_away_did_not_time_out(job, a_pod):
    late = {"running": {"startedAt": "2026-11-21T04:30:00Z"}}
    assert uncounted_failure(read_pod(a_pod(1, "Running", late)), job).reason is Reason.TIMEOUT
    assert uncounted_failure(read_pod(a_pod(1, "Running", late, conditions=[EVICTED])), job) is None


def test_what_it_reported_wins_over_the_clock(job, a_pod, report):
    message = report(exit_code=124, error="its own words", reason=Reason.TIMEOUT)[0]
    verdict = uncounted_failure(pod_that_ended(a_pod, 124, message, told="04:30:10"), job)
    assert (verdict.reason, verdict.message) == (Reason.TIMEOUT, "its own words")


@pytest.mark.parametrize("told", [None, "04:30:29", "04:30:31"])
def test_who_reported_its_timeout_was_late_for_everybody_as_long_as_its_pod_is_there(
    a_job, a_pod, report, told
):
    """The cluster counted another rank, failed in the same second; neither was seen before."""
    at = {**ENDED, "type": "FailureTarget", "lastTransitionTime": "2026-11-21T04:30:30Z"}
    job = read_job(a_job(2, {"failedIndexes": "0", "conditions": [at, ENDED]}))
    message = report(exit_code=124, error="it ran for too long", reason=Reason.TIMEOUT)[0]
    status, _ = map_states(job, [pod_that_ended(a_pod, 124, message, told=told)], [1])[1]
    assert (status.reason, status.exit_code) == (Reason.TIMEOUT, 124)
    assert status.message == "it ran for too long"


def test_an_end_that_was_seen_stays_its_own(a_job, a_pod):
    """Times are whole seconds: only a look before can order a pod's end and its deletion."""
    at = {**ENDED, "type": "FailureTarget", "lastTransitionTime": "2026-11-21T04:30:30Z"}
    job = read_job(a_job(2, {"failedIndexes": "0", "conditions": [at, ENDED]}))
    seen = None
    for told in (None, "04:30:30"):
        found = map_states(job, [pod_that_ended(a_pod, 4, told=told)], [1], seen and {1: seen})
        status, seen = found[1]
        assert (status.reason, status.exit_code) == (Reason.ERROR, 4)
    stranger, _ = map_states(job, [pod_that_ended(a_pod, 4, told="04:30:30")], [1])[1]
    assert stranger.reason is Reason.GANG_FAILED


def gang(a_job, a_pod, **metadata):
    """A rank of a run that ended at 12:48:17, as recorded: told to end, then the last delete."""
    at = {**ENDED, "type": "FailureTarget", "lastTransitionTime": "2026-11-21T12:48:17Z"}
    job = read_job(a_job(2, {"failedIndexes": "0", "conditions": [at, ENDED]}))
    state = {"exitCode": 143, "startedAt": "2026-11-21T12:48:01Z", "reason": "Error"}
    pod = a_pod(1, "Failed", {"terminated": {**state, "finishedAt": "2026-11-21T12:48:18Z"}})
    pod["metadata"] |= metadata
    return job, read_pod(pod)


LAST_DELETE = {"deletionTimestamp": "2026-11-21T12:48:19Z", "deletionGracePeriodSeconds": 0}


def test_the_kubelets_last_delete_does_not_make_an_end_its_own(a_job, a_pod):
    job, pod = gang(a_job, a_pod, **LAST_DELETE)
    status, _ = map_states(job, [pod], [1])[1]
    assert (status.reason, status.exit_code) == (Reason.GANG_FAILED, None)


def test_since_when_it_is_being_deleted_never_jumps(a_job, a_pod):
    told = {"deletionTimestamp": "2026-11-21T12:48:22Z", "deletionGracePeriodSeconds": 6}
    running = a_pod(1)
    running["metadata"] |= told
    seen, messages = {}, []
    for pod in (read_pod(running), gang(a_job, a_pod, **LAST_DELETE)[1]):
        status, last = map_states(read_job(a_job(2, {"active": 2})), [pod], [1], seen)[1]
        seen = {1: last}
        messages.append(status.message)
    assert messages[0] == messages[1]
    assert "is being deleted since 2026-11-21T12:48:16Z" in messages[0]


def test_an_end_after_the_runs_is_not_its_own(a_job, a_pod):
    """The others are gone by then, so their peers fail; this pod has not been deleted yet."""
    job, pod = gang(a_job, a_pod)
    status, _ = map_states(job, [pod], [1])[1]
    assert status.reason is Reason.GANG_FAILED


@pytest.mark.parametrize(
    ("code", "words", "ended", "reason"),
    [
        (143, None, 17, Reason.PLATFORM),
        (137, None, 17, Reason.PLATFORM),
        (1, {"exit_code": 1, "reason": Reason.CANCEL_REQUESTED}, 17, Reason.PLATFORM),
        (143, None, 18, Reason.GANG_FAILED),
        (4, None, 17, Reason.ERROR),
        (143, {"exit_code": 143, "signal": "SIGTERM", "reason": Reason.ERROR}, 17, Reason.ERROR),
    ],
)
def test_who_comes_after_the_last_delete_tells_an_end_by_how_it_left(
    a_job, a_pod, report, code, words, ended, reason
):
    """When it was told to end is not known any more, and the run's end was decided in second 18."""
    at = {**ENDED, "type": "FailureTarget", "lastTransitionTime": "2026-11-21T12:48:18Z"}
    job = read_job(a_job(2, {"failedIndexes": "0", "conditions": [at, ENDED]}))
    state = {"exitCode": code, "startedAt": "2026-11-21T12:48:01Z", "reason": "Error"}
    state |= {"finishedAt": f"2026-11-21T12:48:{ended}Z", "message": words and report(**words)[0]}
    pods = []
    for index in (0, 1):
        pods.append(a_pod(index, "Failed", {"terminated": state}, failures=0))
        pods[-1]["metadata"] |= LAST_DELETE
    counted, other = map_states(job, [read_pod(pod) for pod in pods], [0, 1]).values()
    assert other[0].reason is reason
    # The Job lists rank 0, and so has not ended it.
    assert counted[0].reason is (Reason.PLATFORM if reason is Reason.GANG_FAILED else reason)
    for status in (counted[0], other[0]):
        if status.reason is Reason.PLATFORM:
            assert status.exit_code is None
            # Nobody knows more of an end by SIGKILL: the kernel may have killed it before it was
            # deleted.
            how = ", or its program was ended by SIGKILL before" if code == 137 else ": by hand"
            assert f"was deleted{how}" in status.message


def test_a_container_that_ran_out_of_memory_was_not_told_to_end(a_job, a_pod):
    job = read_job(a_job(1, {"failedIndexes": "0"}))
    state = {"exitCode": 137, "reason": "OOMKilled", "finishedAt": "2026-11-21T12:48:17Z"}
    pod = a_pod(0, "Failed", {"terminated": state}, failures=0)
    pod["metadata"] |= LAST_DELETE
    assert map_states(job, [read_pod(pod)], [0])[0][0].reason is Reason.OOM

"""What a rank had come to by itself when another one ended the run, from its pod alone."""

import pytest

from diloco_eks._facts import read_job, read_pod
from diloco_eks._own_end import own_end, uncounted_success
from diloco_eks._states import map_states
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


def pod_that_ended(a_pod, code=0, message="", told=None, at="04:30:30", **values):
    """A pod whose container ended at a time; ``told`` is when it was told to, if it was."""
    start, end = "2026-11-21T04:30:00Z", f"2026-11-21T{at}Z"
    state = {"exitCode": code, "startedAt": start, "finishedAt": end, "message": message}
    pod = a_pod(1, "Succeeded" if code == 0 else "Failed", {"terminated": state}, **values)
    if told is not None:
        pod["metadata"] |= {
            "deletionTimestamp": f"2026-11-21T{told}Z",
            "deletionGracePeriodSeconds": 0,
        }
    return read_pod(pod)


def test_a_pod_that_was_taken_away_did_not_time_out(job, a_pod):
    late = {"running": {"startedAt": "2026-11-21T04:30:00Z"}}
    assert own_end(read_pod(a_pod(1, "Running", late)), job).reason is Reason.TIMEOUT
    assert own_end(read_pod(a_pod(1, "Running", late, conditions=[EVICTED])), job) is None


def test_what_it_reported_wins_over_the_clock(job, a_pod, report):
    message = report(exit_code=124, error="its own words", reason=Reason.TIMEOUT)[0]
    verdict = own_end(pod_that_ended(a_pod, 124, message, told="04:30:10"), job)
    assert (verdict.reason, verdict.message) == (Reason.TIMEOUT, "its own words")


def test_an_end_that_was_seen_stays_its_own(job, a_pod):
    """Times are whole seconds: of a pod that is told to end in the same one, only who saw it before knows."""
    seen = None
    for told in (None, "04:30:30"):
        found = map_states(job, [pod_that_ended(a_pod, 4, told=told)], [1], seen and {1: seen})
        status, seen = found[1]
        assert (status.reason, status.exit_code) == (Reason.ERROR, 4)
    stranger, _ = map_states(job, [pod_that_ended(a_pod, 4, told="04:30:30")], [1])[1]
    assert stranger.reason is Reason.GANG_FAILED


def test_a_success_needs_a_report(a_pod, report):
    good, (large, lines) = report("done")[0], report("x" * 50_000)
    assert 'and returned "done"' in uncounted_success(pod_that_ended(a_pod, message=good))
    assert lines
    assert uncounted_success(pod_that_ended(a_pod, message=large)).endswith(
        "and its result went with its log"
    )
    told = report(exit_code=143, reason=Reason.CANCEL_REQUESTED)[0]
    for pod in (
        pod_that_ended(a_pod),
        pod_that_ended(a_pod, message=told),
        pod_that_ended(a_pod, code=1, message=good),
        pod_that_ended(a_pod, message=good, told="04:30:00"),
        None,
    ):
        assert uncounted_success(pod) == ""

"""When a replica started, as long as anything says so."""

from diloco_eks._state._reading import read_job, read_pod
from diloco_eks._state._states import map_states

BEGAN = 1795235448.0  # 2026-11-21T04:30:48Z
ENDED = {
    "terminated": {
        "exitCode": 143,
        "startedAt": "2026-11-21T04:30:48Z",
        "finishedAt": "2026-11-21T04:31:00Z",
    }
}


def look(job, pods, seen=None):
    ((status, remembered),) = map_states(
        read_job(job), [read_pod(pod) for pod in pods], [0], seen
    ).values()
    return str(status.state), status.started_at, {0: remembered}


def test_a_container_that_has_ended_and_is_not_counted_had_started(a_job, a_pod):
    cancelled = a_job(1, {"active": 1}, cancelled=True)
    assert look(cancelled, [a_pod(0, state=ENDED, deleting=True)])[:2] == ("running", BEGAN)


def test_who_has_seen_it_knows_it_when_the_pod_is_gone(a_job, a_pod):
    *_, seen = look(a_job(1, {"active": 1}), [a_pod(0)])
    for job in (a_job(1, {"active": 1}), a_job(1, {"terminating": 1}, cancelled=True)):
        assert look(job, [], seen)[:2] == ("running", BEGAN)


def test_what_will_be_started_again_has_not_started(a_job, a_pod):
    taken = [{"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}]
    pod = a_pod(0, "Failed", ENDED, conditions=taken)
    assert look(a_job(1, {"active": 1}), [pod])[:2] == ("pending", None)

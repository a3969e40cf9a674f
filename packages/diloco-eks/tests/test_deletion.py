"""Pods that are taken away say by whom, and what they wait for."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from diloco_protocol import InvalidRequestError, Reason


def stamp(seconds):
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def test_a_drain_is_named_before_and_after(bench):
    run = bench.launch(1)
    name, now = run.pod(0).name, stamp(bench.world.now())
    run.pod(0).on_term(143, after=5.0)
    run.pod(0).evict()
    status = run.describe(0)
    assert (status.state, status.stopping) == ("running", True)
    words = "EvictionByEvictionAPI: Eviction API: evicting"
    assert status.message == f"its pod {name} is being taken away since {now} ({words})"
    told = []
    while run.describe(0).attempt == 1 or not told:
        bench.world.advance(0.25)
        told.append(run.describe(0))
    assert all(words in status.message for status in told[:-1])
    assert words not in run.describe(0).message  # the next pod


def test_what_waits_for_its_next_pod_says_why_the_last_one_went(a_job, a_pod):
    from diloco_eks._state._reading import read_job, read_pod
    from diloco_eks._state._states import map_states

    mark = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}
    pod = read_pod(a_pod(0, "Running", name="run-1-0-x", conditions=[mark], deleting=True))
    job, seen = read_job(a_job(1, {"active": 1})), {}
    for pods in ([pod], [], []):
        status, last = map_states(job, pods, range(1), seen)[0]
        seen = {0: last}
    assert (status.state, status.reason) == ("pending", Reason.PREEMPTED)
    assert status.message == (
        "its pod run-1-0-x was taken away (PreemptionByScheduler); there is no pod for it yet"
    )


def test_a_pod_that_somebody_deletes(bench):
    run = bench.launch(1)
    run.pod(0).on_term(143, after=5.0)
    run.pod(0).delete()
    assert "is being deleted since" in run.describe(0).message
    assert "by hand" in run.describe(0).message


def test_a_node_that_is_dead(bench):
    run = bench.launch(2)
    lost = run.pod(0)
    now = stamp(bench.world.now())
    lost.lose()
    bench.world.advance(3600)
    status = run.describe(0)
    assert (status.state, status.stopping, status.attempt) == ("running", True, 1)
    assert (
        "DeletionByTaintManager: Taint manager: deleting due to NoExecute taint" in status.message
    )
    assert f"its node stand-in-0 has not answered since {now}" in status.message
    assert "kubectl delete node stand-in-0" in status.message
    assert run.describe(1).message == ""
    assert len(bench.pods(run.handles[0])) == 2  # nothing replaces it
    lost.found()
    bench.world.settle(within=30)
    assert (run.describe(0).state, run.describe(0).attempt) == ("pending", 2)


def test_a_node_that_answers_is_not_called_dead(bench):
    run = bench.launch(1)
    run.pod(0).on_term(143, after=5.0)
    run.pod(0).disrupt("DeletionByTaintManager", "Taint manager: deleting due to NoExecute taint")
    assert "kubectl" not in run.describe(0).message


def test_a_run_that_ends_says_so_first(bench):
    run = bench.launch(1)
    run.pod(0).ignore_term()
    run.executor.cancel(run.handles[0])
    bench.world.advance(2)
    assert run.describe(0).message == "the run is being cancelled"


def test_several_culprits_read_well(a_job, a_pod):
    from diloco_eks._state._facts import parse_time
    from diloco_eks._state._reading import read_job, read_pod
    from diloco_eks._state._states import map_states

    end = {"type": "Failed", "status": "True", "reason": "MaxFailedIndexesExceeded"}
    job = read_job(a_job(4, {"failedIndexes": "1,2", "conditions": [end]}))
    ended = {"terminated": {"exitCode": 3}}
    pods = [read_pod(a_pod(index, "Failed", ended)) for index in (1, 2)]
    status, _ = map_states(job, pods, range(4))[0]
    assert status.message == (
        "the run was ended because rank 1 failed (and 1 more): it exited with code 3"
    )
    told = {**ended["terminated"], "finishedAt": "2026-11-21T04:31:00Z"}
    pods = [read_pod(a_pod(1, "Failed", {"terminated": told}, deleting=True))]
    pods = [replace(pods[0], told_to_end=parse_time("2026-11-21T04:30:50Z"))]
    status, _ = map_states(job, pods, range(4))[0]
    assert status.message == (
        "the run was ended because rank 1 failed (and 1 more): its pod run-1-1-abcde was deleted "
        "at 2026-11-21T04:30:50Z: by hand, with its namespace, or by something that gave no "
        "reason; its exit code was 3"
    )


def test_what_was_seen_of_pods_that_somebody_deleted_is_the_last_word(bench):
    """As with kubectl delete pod, or with the namespace of a run."""
    run = bench.launch(2)
    for rank in (0, 1):
        run.pod(rank).on_term(143, after=3.0)
        run.pod(rank).delete()
    told = []
    while not all(status.state.terminal for status in told[-2:]) or not told:
        told += [run.describe(0), run.describe(1)]
        bench.world.advance(0.5)
    for status in told[-2:]:
        assert (status.state, status.reason, status.exit_code) == ("failed", "platform", None)
        assert "was deleted at" in status.message
        assert "by hand, with its namespace, or by something" in status.message
    newcomer = bench.executor()  # the Job has counted one of them, whichever ended first
    late = sorted(
        (run.describe(rank, newcomer) for rank in (0, 1)),
        key=lambda each: each.reason == "gang_failed",
    )
    assert (late[0].state, late[0].reason, late[0].exit_code) == ("failed", "platform", None)
    assert late[1].reason in {"platform", "gang_failed"}
    assert "so neither exit code nor message are known" in late[0].message


@pytest.mark.parametrize("completions", [3, 1])
def test_a_job_that_somebody_scales_down_says_so(bench, completions):
    run = bench.launch(3)
    spec = {"parallelism": 1, "completions": completions}
    run.executor._cluster.patch_job("default", run.name, {"spec": spec})
    bench.world.settle()
    if completions == 3:
        run.describe(2)  # whether its pod is replaced is not known yet
        assert "the Job's spec.parallelism was set to 1" in run.describe(2).message
    else:
        with pytest.raises(InvalidRequestError, match="the Job's completions were changed"):
            run.describe(2)
    run.executor.cancel(run.handles[2])
    bench.world.settle()
    run.executor.purge(run.handles[2])
    bench.world.settle()
    assert run.executor.list_runs() == []


def test_a_job_that_somebody_suspends_says_so(bench):
    run = bench.launch(1)
    run.pod(0).on_term(143, after=3.0)
    run.executor._cluster.patch_job("default", run.name, {"spec": {"suspend": True}})
    told = []
    for _ in range(20):
        bench.world.advance(0.5)
        told.append(run.describe(0))
    assert told[-1].state == "pending"
    ending = [status for status in told if status.stopping]
    assert ending
    for status in (*ending, told[-1]):
        assert status.message.startswith("the Job is suspended since ")
        assert "by hand" in status.message

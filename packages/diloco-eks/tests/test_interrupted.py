"""A replica that leaves with code 0 because it was told to end has not succeeded."""

import os
import sys

import pytest
from eks_lab import PATIENCE

from diloco_eks import EKSExecutor
from diloco_localcloud import KubernetesProcesses
from diloco_protocol import Backoff, Reason

TRAINER = """
import pathlib, signal, sys, time

def save_and_exit(marker):
    if pathlib.Path(marker).exists():
        return "resumed"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    pathlib.Path(marker).touch()
    while True:
        time.sleep(0.05)
"""


def test_a_container_that_leaves_with_zero_when_it_is_evicted(punctual_bench):
    run = punctual_bench.launch(1)
    run.pod(0).on_term(0, after=1.0)
    run.pod(0).evict()
    told, pods = [], []
    for _ in range(30):
        told.append(run.describe(0))
        pods += [pod.json["status"]["phase"] for pod in punctual_bench.pods(run.handles[0])]
        punctual_bench.world.advance(0.1)
    states = list(dict.fromkeys(str(status.state) for status in told))
    assert states == ["running", "failed"]
    assert pods[-1] == "Succeeded"  # and then the cluster has removed it
    last = told[-1]
    assert (last.reason, last.exit_code) == (Reason.EVICTED, None)
    assert "left with code 0 when it was told to end" in last.message
    assert "EvictionByEvictionAPI" in last.message
    assert (
        punctual_bench.world.job("run-1")["status"]["completedIndexes"] == "0"
    )  # says the cluster
    (result,) = run.executor.collect(run.handles, timeout=60)
    assert (result["status"], result["reason"]) == ("failed", "evicted")


@pytest.mark.parametrize("told_to_end", [True, False])
def test_what_returned_has_succeeded(a_job, a_pod, report, told_to_end):
    from diloco_eks._state._reading import read_job, read_pod
    from diloco_eks._state._states import map_states

    mark = {
        "type": "DisruptionTarget",
        "status": "True",
        "reason": "EvictionByEvictionAPI",
        "lastTransitionTime": "2026-11-21T04:31:00Z",
    }
    ended = {"exitCode": 0, "finishedAt": f"2026-11-21T04:{'31' if told_to_end else '30'}:30Z"}
    if told_to_end:
        ended["message"] = report("done")[0]  # the runner knows that the entrypoint returned
    pod = a_pod(0, "Succeeded", {"terminated": ended}, conditions=[mark], deleting=True)
    job = read_job(a_job(1, {"completedIndexes": "0"}))
    status, _ = map_states(job, [read_pod(pod)], range(1))[0]
    assert status.state == "succeeded"


def test_what_its_runner_reported_as_a_failure_is_no_success(bench, report):
    """Something else may have the last word in a container, and leave with code 0."""
    run = bench.launch(2)
    run.pod(0).succeed(report(exit_code=3, error="bad data", reason=Reason.ERROR)[0])
    run.pod(1).succeed(report("done")[0])
    bench.world.settle()
    failed, done = run.executor.collect(run.handles, timeout=60)
    told = failed["status"], failed["exit_code"], failed["reason"], failed["error"]
    assert told == ("failed", 3, "error", "bad data")
    assert (done["status"], done["result"]) == ("succeeded", "done")
    assert bench.executor().collect(run.handles, timeout=1) == [failed, done]


@pytest.mark.processes
def test_a_trainer_that_exits_with_zero_on_sigterm_is_replaced(tmp_path):
    (tmp_path / "spot.py").write_text(TRAINER)
    marker = tmp_path / "begun"
    path = os.pathsep.join([str(tmp_path), *sys.path])
    with (
        KubernetesProcesses(backoff_seconds=0.2, tls=False) as cluster,
        EKSExecutor(
            "any",
            kubeconfig=cluster.kubeconfig(tmp_path / "kubeconfig"),
            cpu_request="1",
            memory_request="1Gi",
            env={"PYTHONPATH": path},
            backoff=Backoff(first=0.1, cap=0.5),
        ) as executor,
    ):
        handles = executor.launch_replicas(1, "spot:save_and_exit", {"marker": str(marker)})
        name = handles[0].run_id
        wait_until(cluster, marker.exists)
        cluster.pods.newest(name, 0).evict()
        (result,) = executor.collect(handles, timeout=PATIENCE)
    assert (result["status"], result["attempt"], result["result"]) == ("succeeded", 2, "resumed")


def wait_until(cluster, fact):
    """The marker is a file, of which the cluster says nothing: ask again and again."""
    import time

    deadline = time.monotonic() + PATIENCE
    while not fact():
        assert time.monotonic() < deadline
        time.sleep(0.02)

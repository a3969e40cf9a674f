"""A namespace deleted under running replicas: none counts as failed, whoever looks, whenever."""

import time

import pytest
from eks_lab import PATIENCE
from kubernetes import client, config

from diloco_eks import EKSExecutor
from diloco_localcloud import KubernetesProcesses, KubernetesStandIn


@pytest.fixture(params=[0, 3], ids=["usual", "strict"])
def team(request, a_bench, tmp_path):
    """A bench with the namespace ``team``."""
    with KubernetesStandIn(strict_timing=request.param, tls=False) as stand_in:
        bench = a_bench(stand_in, tmp_path)
        bench.create("/api/v1/namespaces", {"metadata": {"name": "team"}})
        yield bench
        bench.close()


def exists(run):
    try:
        return bool(run.world.job(run.name, "team"))
    except LookupError:
        return False


def delete_and_watch(run):
    """Delete the namespace; return what launcher and new executors say until the Job is gone."""
    run.bench.create("/api/v1/namespaces/team", {}, method="DELETE")
    watched, newcomers = [], []
    while exists(run):
        newcomer = run.bench.executor(namespace="team")
        newcomers += [
            (each["status"], each["reason"], each["exit_code"], each["error"])
            for each in newcomer.collect(run.handles, timeout=0)
            if each["status"] in {"succeeded", "failed", "cancelled"}
        ]
        newcomer.close()
        watched += [
            (status.state, status.reason, status.exit_code, status.message)
            for status in (run.describe(rank) for rank in range(len(run.handles)))
            if status.state.terminal
        ]
        assert run.world.step()
    return watched, newcomers


def check(ends, reasons):
    assert {(state, code) for state, _, code, _ in ends} == {("failed", None)}
    assert {reason for _, reason, _, _ in ends} <= reasons
    for _, reason, _, message in ends:
        assert reason == "lost" or "deleted" in message or "pod has been removed" in message


@pytest.mark.sampled
@pytest.mark.parametrize("policy", ["fail_run", "continue"])
@pytest.mark.parametrize("code", [143, 137, 0])
def test_its_replicas_were_interrupted(team, policy, code):
    run = team.launch(2, executor=team.executor(namespace="team", on_replica_failure=policy))
    for rank in (0, 1):
        run.pod(rank).on_term(code, after=1.0 + rank)
        if code == 137:
            run.pod(rank).ignore_term()
    assert run.states() == ["running", "running"]
    watched, newcomers = delete_and_watch(run)
    check(watched, {"platform"})
    if code != 0:  # the cluster counts it as a success, and a newcomer knows no more
        check(newcomers, {"platform", "gang_failed", "lost"})
    # Who saw an end still knows it; to others they are lost.
    known = [each["reason"] for each in run.executor.collect(run.handles, timeout=1)]
    assert known[0] == "platform"
    assert known[1] in {"platform", "lost"}
    late = team.executor(namespace="team")
    assert [each["reason"] for each in late.collect(run.handles, timeout=1)] == ["lost", "lost"]


def test_a_failure_of_its_own_stays_one(team, report):
    """Also where a newcomer sees the pod only while it is removed."""
    run = team.launch(2, executor=team.executor(namespace="team", on_replica_failure="continue"))
    run.pod(0).fail(4, report(exit_code=4, error="ValueError: mine", reason="error")[0])
    watched, newcomers = delete_and_watch(run)
    for ends in (watched, newcomers):
        assert ("failed", "error", 4, "ValueError: mine") in ends
        assert not [end for end in ends if end[1] == "error" and end[2] != 4]


@pytest.mark.processes
@pytest.mark.slow
def test_what_runners_report_of_it_is_no_failure_of_their_own(tmp_path):
    """Pods are processes, whose runner is told to end, ends the program, and says so."""
    with KubernetesProcesses(namespace="team", tls=False) as cluster:
        path = cluster.kubeconfig(tmp_path / "kubeconfig")
        options = {"kubeconfig": path, "namespace": "team", "grace": 2.0}
        options |= {"cpu_request": "1", "memory_request": "1Gi"}
        with EKSExecutor("any", **options) as executor:
            arguments = {"args": ["sleep", "600"]}
            handles = executor.launch_replicas(2, "subprocess:call", arguments)
            deadline = time.monotonic() + PATIENCE
            while {executor.poll(handle) for handle in handles} != {"running"}:
                assert time.monotonic() < deadline
        api = config.new_client_from_config(str(path))
        client.CoreV1Api(api).delete_namespace(name="team")
        reasons, codes = set(), set()
        while "lost" not in reasons:
            assert time.monotonic() < deadline
            with EKSExecutor("any", **options) as newcomer:
                ends = newcomer.collect(handles, timeout=0)
            reasons |= {each["reason"] for each in ends if each["status"] == "failed"}
            codes |= {each["exit_code"] for each in ends}
        api.rest_client.pool_manager.clear()
    assert reasons <= {"platform", "gang_failed", "lost"}
    assert codes == {None}

"""Large arguments travel in a ConfigMap that the Job owns."""

import json

import pytest
from eks_lab import PATIENCE

from diloco_eks import EKSExecutor
from diloco_localcloud import KubernetesProcesses
from diloco_protocol import (
    Backoff,
    ForbiddenError,
    InvalidRequestError,
    LaunchError,
    UnavailableError,
)

LARGE = {"text": "x" * 70_000}


def maps(bench):
    return bench.create("/api/v1/namespaces/default/configmaps?", None, "GET")["items"]


def names(bench):
    return [each["metadata"]["name"] for each in maps(bench)]


def test_small_ones_stay_in_the_job(bench):
    bench.launch(1, kwargs={"text": "x" * 30_000})
    assert names(bench) == []


def test_a_list_of_pods_does_not_repeat_them(bench):
    run = bench.launch(50, start=False, kwargs={"text": "x" * 500_000})
    assert names(bench) == ["run-1-arguments"]
    uid = run.handles[0].metadata["job_uid"]
    pods = run.executor._cluster.list_pods("default", f"batch.kubernetes.io/controller-uid={uid}")
    assert len(pods) == 50
    assert len(json.dumps(pods)) < 500_000
    (job, arguments) = run.executor.plan(50, "trainer:train", {"text": "x" * 500_000}).requests
    assert (job["kind"], arguments["kind"]) == ("Job", "ConfigMap")


def test_they_go_with_the_job(bench):
    run = bench.launch(1, kwargs=LARGE)
    assert bench.launch(1, kwargs=LARGE, executor=run.executor).handles == run.handles
    run.executor.cancel(run.handles[0])
    bench.world.settle()
    run.executor.purge(run.handles[0])
    bench.world.settle()
    assert names(bench) == []
    again = bench.launch(1, kwargs={"text": "y" * 70_000})
    owner = maps(bench)[0]["metadata"]["ownerReferences"][0]
    assert owner["uid"] == again.handles[0].metadata["job_uid"]


def test_those_of_an_earlier_run_are_waited_out(bench):
    """The garbage collector is slow: the name is taken until it comes."""
    path = "/api/v1/namespaces/default/configmaps"
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": "run-1", "uid": "another"}
    bench.create(path, {"metadata": {"name": "run-1-arguments", "ownerReferences": [owner]}})
    begin = bench.world.now()

    def sleep(seconds):
        bench.world.advance(seconds)
        if bench.world.now() > begin + 5 and owner:
            bench.create(f"{path}/run-1-arguments", {}, "DELETE")
            owner.clear()

    backoff = Backoff(first=0.5, clock=bench.world.now, sleep=sleep)
    run = bench.launch(1, kwargs=LARGE, executor=bench.executor(backoff=backoff))
    (known,) = maps(bench)[0]["metadata"]["ownerReferences"]
    assert known["uid"] == run.handles[0].metadata["job_uid"]


def test_without_the_right_nothing_is_created(bench):
    bench.stand_in.access.deny("create", "configmaps")
    with pytest.raises(ForbiddenError, match=r"configmaps.*Role"):
        bench.launch(1, kwargs=LARGE)
    assert bench.executor().list_runs() == []
    bench.launch(1)


def test_if_they_cannot_be_sent_the_job_is_withdrawn(bench, monkeypatch):
    executor = bench.executor()

    def fail(body, *, dry_run=False):
        if not dry_run:
            raise ForbiddenError("no more")

    monkeypatch.setattr(executor._cluster, "create_config_map", fail)
    with pytest.raises(ForbiddenError, match="no more"):
        bench.launch(1, kwargs=LARGE, executor=executor)
    bench.world.settle(within=40)
    assert executor.list_runs() == []


def test_a_run_that_was_there_before_is_never_withdrawn(bench, monkeypatch):
    run = bench.launch(1, kwargs=LARGE)
    executor = bench.executor(retry_timeout=5)

    def fail(body, *, dry_run=False):
        if not dry_run:
            raise UnavailableError("not now")

    monkeypatch.setattr(executor._cluster, "create_config_map", fail)
    with pytest.raises(LaunchError, match="Launch it again with the same run_id") as caught:
        bench.launch(1, kwargs=LARGE, executor=executor)
    assert list(caught.value.survivors) == run.handles
    assert run.states() == ["running"]


def test_what_is_too_large_is_refused(bench):
    with pytest.raises(InvalidRequestError, match="a ConfigMap holds 1048576"):
        bench.executor().plan(1, "a:b", {"text": "x" * 900_000})


@pytest.mark.processes
def test_they_arrive(tmp_path):
    text = json.dumps("y" * 300_000)
    with (
        KubernetesProcesses(tls=False) as cluster,
        EKSExecutor(
            "any",
            kubeconfig=cluster.kubeconfig(tmp_path / "kubeconfig"),
            cpu_request="1",
            memory_request="1Gi",
            backoff=Backoff(first=0.1, cap=0.5),
        ) as executor,
    ):
        handles = executor.launch_replicas(2, "json:loads", {"s": text})
        results = executor.collect(handles, timeout=PATIENCE)
    assert [len(result["result"]) for result in results] == [300_000] * 2

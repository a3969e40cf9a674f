"""Large arguments travel in a ConfigMap that the Job owns."""

import hashlib
import json
import re

import pytest
from eks_lab import PATIENCE

from diloco_eks import EKSExecutor
from diloco_eks._client._cluster import Cluster
from diloco_localcloud import KubernetesProcesses
from diloco_protocol import (
    Backoff,
    ForbiddenError,
    InvalidRequestError,
    LaunchError,
    ReplicaSpec,
    UnavailableError,
    spec_to_environment,
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
    (name,) = names(bench)
    assert re.fullmatch("run-1-arguments-[0-9a-f]{16}", name)
    pods = bench.pods(run.handles[0])
    assert len(pods) == 50
    assert len(json.dumps([pod.json for pod in pods])) < 500_000
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
    (_, planned) = bench.executor().plan(1, "trainer:train", LARGE, run_id="run-1").requests
    name = planned["metadata"]["name"]
    bench.create(path, {"metadata": {"name": name, "ownerReferences": [owner]}})
    begin = bench.world.now()

    def sleep(seconds):
        bench.world.advance(seconds)
        if bench.world.now() > begin + 5 and owner:
            bench.create(f"{path}/{name}", {}, "DELETE")
            owner.clear()

    backoff = Backoff(first=0.5, clock=bench.world.now, sleep=sleep)
    run = bench.launch(1, kwargs=LARGE, executor=bench.executor(backoff=backoff))
    (known,) = maps(bench)[0]["metadata"]["ownerReferences"]
    assert known["uid"] == run.handles[0].metadata["job_uid"]


def container_of(job):
    return job["spec"]["template"]["spec"]["containers"][0]


def test_the_pod_itself_says_which_they_are(bench):
    """Whatever else is called so: an earlier run's, or what somebody put there."""
    bench.create(
        "/api/v1/namespaces/default/configmaps",
        {"metadata": {"name": "run-1-arguments"}, "data": {"DILOCO_SPEC_0": "forged"}},
    )
    bench.launch(1, kwargs=LARGE)
    container = container_of(bench.world.job("run-1"))
    (created,) = [each for each in maps(bench) if each["metadata"]["name"] != "run-1-arguments"]
    digest = hashlib.sha256("".join(created["data"].values()).encode()).hexdigest()
    assert f"--spec-sha256={digest}" in container["args"]
    assert created["metadata"]["name"] == f"run-1-arguments-{digest[:16]}"
    pieces = [each for each in container["env"] if each["name"].startswith("DILOCO_SPEC_")]
    sources = [each["valueFrom"]["configMapKeyRef"] for each in pieces]
    assert {source["name"] for source in sources} == {created["metadata"]["name"]}
    other = bench.executor().plan(1, "trainer:train", {"text": "y" * 70_000}, run_id="run-1")
    assert container_of(other.requests[0])["args"] != container["args"]


def test_another_order_of_the_keys_is_the_same_launch(bench):
    run = bench.launch(1, kwargs={**LARGE, "a": {"b": 1, "c": 2}})
    again = bench.launch(1, kwargs={"a": {"c": 2, "b": 1}, **LARGE}, executor=run.executor)
    assert again.handles == run.handles
    assert len(maps(bench)) == 1


def test_what_somebody_else_wrote_is_not_taken_for_them(bench):
    executor = bench.executor(retry_timeout=5)
    (_, planned) = executor.plan(1, "trainer:train", LARGE, run_id="run-1").requests
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": "run-1", "uid": "another"}
    metadata = {"name": planned["metadata"]["name"], "ownerReferences": [owner]}
    path = "/api/v1/namespaces/default/configmaps"
    bench.create(path, {"metadata": metadata, "data": {"DILOCO_SPEC_0": "forged"}})
    with pytest.raises(UnavailableError, match="one that is not this run's"):
        bench.launch(1, kwargs=LARGE, executor=executor)
    bench.world.settle(within=40)
    assert executor.list_runs() == []


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


@pytest.mark.parametrize("error", [KeyboardInterrupt, UnavailableError("not now")])
def test_a_run_that_another_launcher_has_completed_is_not_withdrawn(bench, monkeypatch, error):
    executor, others = bench.executor(retry_timeout=5), []

    def fail(body, *, dry_run=False):
        if not dry_run:
            others.append(bench.launch(1, kwargs=LARGE))
            raise error

    monkeypatch.setattr(executor._cluster, "create_config_map", fail)
    if error is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt) as caught:
            bench.launch(1, kwargs=LARGE, executor=executor)
        assert "the run 'run-1' is there, and has all it needs" in caught.value.__notes__[0]
    else:
        assert bench.launch(1, kwargs=LARGE, executor=executor).handles == others[0].handles
    bench.world.settle(within=40)
    assert others[0].states() == ["running"]


def test_whether_a_run_is_complete_has_to_be_known_before_it_is_withdrawn(bench, monkeypatch):
    executor = bench.executor(retry_timeout=5)

    def fail(*args, dry_run=False):
        if not dry_run:
            raise UnavailableError("not now")

    monkeypatch.setattr(executor._cluster, "create_config_map", fail)
    monkeypatch.setattr(executor._cluster, "read_config_map", fail)
    with pytest.raises(LaunchError, match="Launch it again with the same run_id"):
        bench.launch(1, kwargs=LARGE, executor=executor)
    assert executor.list_runs() == ["run-1"]


def test_a_run_that_was_there_before_is_never_withdrawn(bench, monkeypatch):
    run = bench.launch(1, kwargs=LARGE)
    bench.create(f"/api/v1/namespaces/default/configmaps/{names(bench)[0]}", {}, "DELETE")
    executor = bench.executor(retry_timeout=5)

    def fail(body, *, dry_run=False):
        if not dry_run:
            raise UnavailableError("not now")

    monkeypatch.setattr(executor._cluster, "create_config_map", fail)
    with pytest.raises(LaunchError, match="Launch it again with the same run_id") as caught:
        bench.launch(1, kwargs=LARGE, executor=executor)
    assert list(caught.value.survivors) == run.handles
    assert run.states() == ["running"]


def test_a_run_whose_arguments_never_came_says_what_helps(bench):
    """As after a launcher that was killed in between: its pods wait for ever."""
    run = bench.launch(1, start=False, kwargs=LARGE)
    (name,) = names(bench)
    run.pod(0).wait_with("CreateContainerConfigError", f'configmap "{name}" not found')
    message = run.describe(0).message
    assert message.startswith(f'CreateContainerConfigError: configmap "{name}" not found; ')
    assert "launch again with run_id='run-1' and the same arguments" in message


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


@pytest.mark.processes
def test_a_replica_runs_nothing_that_was_put_in_their_place(tmp_path, monkeypatch):
    """As by somebody who may create ConfigMaps and is quicker than the launch."""
    create = Cluster.create_config_map
    forged = spec_to_environment(ReplicaSpec("builtins:print", {"sep": "owned"}, 0, 1))

    def replace(cluster, body, *, dry_run=False):
        create(cluster, body if dry_run else {**body, "data": forged}, dry_run=dry_run)

    monkeypatch.setattr(Cluster, "create_config_map", replace)
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
        handles = executor.launch_replicas(1, "json:loads", {"s": json.dumps("y" * 70_000)})
        (result,) = executor.collect(handles, timeout=PATIENCE)
    assert (result["status"], result["reason"]) == ("failed", "start_failed")
    assert "is not the one that was launched" in result["error"]


def test_they_say_where_the_run_meets(bench):
    uri = "s3://bucket/run"
    run = bench.launch(1, kwargs={**LARGE, "rendezvous_uri": uri})
    assert bench.executor().meets_at(run.handles[0]) == uri
    (ours,) = maps(bench)
    path = f"/api/v1/namespaces/default/configmaps/{ours['metadata']['name']}"
    bench.create(path, {}, "DELETE")
    spec = ReplicaSpec("trainer:train", {}, 0, 1, rendezvous_uri="s3://bucket/forged")
    forged = {"metadata": ours["metadata"], "data": spec_to_environment(spec)}
    bench.create(path.rpartition("/")[0], forged)
    with pytest.raises(InvalidRequestError, match="not the one that was launched"):
        bench.executor().meets_at(run.handles[0])

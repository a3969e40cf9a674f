"""Launching: all or nothing, once, whatever happens to the answer."""

import json
import re
import signal
import threading
from pathlib import Path

import pytest

from diloco_eks import EKSExecutor
from diloco_eks._request import _names as names
from diloco_protocol import (
    ForbiddenError,
    InvalidRequestError,
    LaunchError,
    RunConflictError,
    ThrottledError,
    UnavailableError,
    spec_from_environment,
)

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")

JOBS = {"verb": "create", "resource": "jobs"}


def creates(bench):
    return bench.stand_in.calls.count("create", "jobs")


def test_a_launch_is_one_create(bench):
    bench.launch(50, start=False)
    assert [(call.verb, call.resource) for call in bench.stand_in.calls] == [("create", "jobs")]


def test_what_is_planned_is_what_is_sent(bench):
    executor = bench.executor(queue=None, shm_size="1Gi")
    options = {"run_id": "run-1", "gpu": "L4", "timeout": 10.5, "labels": {"team": "a"}}
    (planned,) = executor.plan(2, "trainer:train", {"a": 1}, **options).requests
    assert len(bench.stand_in.calls) == 0
    executor.launch_replicas(2, "trainer:train", {"a": 1}, **options)
    sent = bench.world.job("run-1")
    assert sent["metadata"]["labels"].items() >= planned["metadata"]["labels"].items()
    assert sent["metadata"]["annotations"] == planned["metadata"]["annotations"]
    pod, asked = sent["spec"]["template"]["spec"], planned["spec"]["template"]["spec"]
    sent_env = json.dumps(pod["containers"][0]["env"]).replace(
        ', "apiVersion": "v1"', ""
    )  # the cluster adds it
    assert json.loads(sent_env) == asked["containers"][0]["env"]
    assert pod["affinity"] == asked["affinity"]
    assert pod["tolerations"] == asked["tolerations"]
    for field in (
        "completions",
        "backoffLimitPerIndex",
        "maxFailedIndexes",
        "activeDeadlineSeconds",
        "podFailurePolicy",
    ):
        assert sent["spec"][field] == planned["spec"][field]


def test_the_same_launch_gives_the_same_handles(bench):
    first = bench.launch(2)
    again = bench.executor().launch_replicas(2, "trainer:train", run_id="run-1")
    assert again == first.handles
    assert len(bench.pods(first.handles[0])) == 2


@pytest.mark.parametrize(
    "change", [{"n": 3}, {"kwargs": {"a": 1}}, {"env": {"A": "1"}}, {"timeout": 5}]
)
def test_another_launch_of_the_same_name_is_refused(bench, change):
    bench.launch(2)
    with pytest.raises(RunConflictError, match="of another launch"):
        bench.launch(**{"n": 2, **change})
    assert len(bench.world.pods("run-1")) == 2


def test_a_strangers_job_is_left_alone(bench):
    from kubernetes import client, config

    api = client.BatchV1Api(config.new_client_from_config(str(bench.kubeconfig)))
    template = {"spec": {"restartPolicy": "Never", "containers": [{"name": "x", "image": "x"}]}}
    body = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "run-1"},
        "spec": {"template": template},
    }
    api.create_namespaced_job(namespace="default", body=body)
    with pytest.raises(RunConflictError, match="is of another launch or program"):
        bench.launch(2)
    assert bench.world.job("run-1")["spec"]["completions"] == 1
    api.api_client.rest_client.pool_manager.clear()


def test_a_run_that_is_being_deleted_is_not_taken_over(bench):
    run = bench.launch(1)
    run.pod(0).ignore_term()
    run.executor._cluster.delete_job("default", "run-1", run.handles[0].metadata["job_uid"])
    bench.world.advance(1)
    with pytest.raises(RunConflictError, match="still being deleted"):
        bench.launch(1)


def test_an_answer_that_was_lost_leaves_one_job(bench):
    bench.stand_in.faults.add("ambiguous", **JOBS)
    run = bench.launch(3)
    assert creates(bench) == 2
    assert run.states() == ["running"] * 3
    assert run.executor.list_runs() == ["run-1"]


@pytest.mark.parametrize("kind", ["throttle", "server_error", "unavailable", "cut"])
def test_faults_that_pass_are_waited_out(bench, kind):
    bench.stand_in.faults.add(kind, times=3, retry_after=2, **JOBS)
    began = bench.world.now()
    run = bench.launch(1)
    assert creates(bench) == 4
    assert bench.world.now() - began >= (6 if kind == "throttle" else 0.5)
    assert run.states() == ["running"]


@pytest.mark.parametrize(
    ("kind", "error"), [("throttle", ThrottledError), ("server_error", UnavailableError)]
)
def test_faults_that_stay_are_told(bench, kind, error):
    bench.stand_in.faults.add(kind, times=None, **JOBS)
    with pytest.raises(error) as caught:
        bench.launch(1, executor=bench.executor(retry_timeout=20))
    assert "given up after 20 s" in "".join(caught.value.__notes__)
    bench.stand_in.faults.clear()
    assert bench.executor().list_runs() == []


def test_a_launch_that_may_have_happened_names_its_survivors(bench):
    bench.stand_in.faults.add("ambiguous", times=1, **JOBS)
    bench.stand_in.faults.add("cut", times=None)
    with pytest.raises(LaunchError, match=r"is not known.*attach\('run-1'\)") as caught:
        bench.launch(2, executor=bench.executor(retry_timeout=5))
    bench.stand_in.faults.clear()
    bench.world.settle()
    executor = bench.executor()
    assert [str(executor.poll(handle)) for handle in caught.value.survivors] == [
        "pending",
        "pending",
    ]
    executor.cancel(caught.value.survivors[0])
    bench.world.settle()
    assert [str(executor.poll(handle)) for handle in caught.value.survivors] == [
        "cancelled",
        "cancelled",
    ]


def test_what_is_forbidden_is_named(bench):
    bench.stand_in.access.deny("create", "jobs")
    with pytest.raises(ForbiddenError, match=r'cannot create resource "jobs" in API group "batch"'):
        bench.launch(1)
    assert creates(bench) == 1


def test_a_service_account_must_be_there(bench):
    with pytest.raises(
        InvalidRequestError, match="no service account 'trainer' in the namespace 'default'"
    ):
        bench.launch(1, executor=bench.executor(service_account_name="trainer"))
    assert creates(bench) == 0
    bench.stand_in.access.deny("get", "serviceaccounts")
    bench.launch(1, executor=bench.executor(service_account_name="trainer"), start=False)
    assert creates(bench) == 1


def test_a_namespace_must_be_there(bench):
    with pytest.raises(InvalidRequestError, match="no namespace 'nowhere'"):
        bench.launch(1, executor=bench.executor(namespace="nowhere"))


def test_what_the_cluster_refuses_starts_nothing(bench):
    overlay = {"spec": {"containers": [{"name": "replica", "resources": {"limits": {"cpu": "1"}}}]}}
    with pytest.raises(InvalidRequestError, match="must be less than or equal to cpu limit"):
        bench.launch(1, executor=bench.executor(pod_overlay=overlay))
    assert bench.executor().list_runs() == []


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"n": 0}, "n_replicas must be"),
        ({"gpu": "GB300"}, "known are A100,"),
        ({"memory": "16GB"}, "say '16G'"),
        ({"cpu": "many"}, "cpu must be"),
        ({"run_id": "My_Run"}, "run_id 'My_Run'"),
        ({"run_id": "a" * 60}, "1 to 48"),
        ({"env": {"A-B": "1"}}, "env has the name 'A-B'"),
        ({"env": {"REPLICA_WORLD_SIZE": "1"}}, "may not set REPLICA_WORLD_SIZE"),
        ({"env": {"JOB_COMPLETION_INDEX": "1"}}, "JOB_COMPLETION_INDEX may not be set"),
        ({"secrets": {"TOKEN": "s3cr3t"}}, "a reference, never a value"),
        ({"labels": {"a": "b c"}}, "annotations="),
        ({"kwargs": {"a": {1, 2}}}, "entrypoint_args.a is a builtins.set"),
        ({"kwargs": {"a": "x" * 10**6}}, "put large arguments into the store"),
        ({"timeout": -1}, "timeout must be"),
    ],
)
def test_bad_input_is_refused_before_any_call(bench, options, what):
    with pytest.raises(InvalidRequestError, match=what):
        bench.launch(**{"n": 1, **options})
    assert len(bench.stand_in.calls) == 0


def test_an_unreachable_cluster(bench):
    bench.stand_in.stop()
    with pytest.raises(UnavailableError, match="cannot create Job default/run-1"):
        bench.launch(1, executor=bench.executor(retry_timeout=3))


class Interrupted(BaseException):
    pass


def interrupt_the_answer(bench, monkeypatch):
    """Interrupt the main thread after the cluster has made the Job, before its answer is read."""
    executor = bench.executor()
    create = executor._cluster.create_job

    def interrupted(manifest, **options):
        create(manifest, **options)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(executor._cluster, "create_job", interrupted)
    return executor


def test_an_interrupted_launch_leaves_nothing(bench, monkeypatch):
    assert threading.current_thread() is threading.main_thread()
    executor = interrupt_the_answer(bench, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        executor.launch_replicas(2, "trainer:train")
    bench.world.settle()
    assert bench.world.pods() == []
    assert bench.executor().list_runs() == []


def test_a_launch_that_is_interrupted_while_its_handles_are_made_leaves_nothing(bench, monkeypatch):
    executor = bench.executor()
    monkeypatch.setattr(executor, "_handles", lambda *_: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        executor.launch_replicas(2, "trainer:train")
    bench.world.settle()
    assert bench.executor().list_runs() == []


def test_an_interrupted_launch_of_a_named_run_says_its_name(bench, monkeypatch):
    """It may be a second launch of that name, and the first one's replicas are not ours to end."""
    executor = interrupt_the_answer(bench, monkeypatch)
    with pytest.raises(KeyboardInterrupt) as caught:
        executor.launch_replicas(2, "trainer:train", run_id="run-1")
    assert "the run 'run-1' may have been created" in caught.value.__notes__[0]
    assert bench.executor().list_runs() == ["run-1"]


def test_an_interrupted_launch_that_is_under_way_says_its_name(bench, monkeypatch):
    """The cluster takes its time, and makes the Job when the launcher has looked for it."""
    executor = bench.executor()
    create, sent = executor._cluster.create_job, []

    def interrupted(manifest, **options):
        sent.append(manifest)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(executor._cluster, "create_job", interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        executor.launch_replicas(2, "trainer:train")
    create(sent[0])
    (run_id,) = bench.executor().list_runs()
    assert f"the run {run_id!r} may have been created, or may be yet" in caught.value.__notes__[0]


def test_the_launchs_labels_select_its_job_and_pods(bench):
    bench.launch(2, labels={"team": "vision"}, executor=bench.executor(owner="ada"))
    executor = bench.executor()
    for key, value in (("team", "vision"), (names.OWNER, "ada"), (names.RUN, "run-1")):
        assert executor._cluster.list_runs("default", f"{key}={value}") == ["run-1"]
    for pod in bench.world.pods("run-1"):
        labels = pod.json["metadata"]["labels"]
        assert (labels["team"], labels[names.OWNER], labels[names.RUN]) == (
            "vision",
            "ada",
            "run-1",
        )


def job_of(bench, **options):
    """The Job that a launch creates."""
    executor = options.pop("executor", None) or bench.executor()
    (job,) = executor.plan(
        options.pop("n", 2), "trainer:train", options.pop("kwargs", None), **options
    ).requests
    return job


def container_of(job):
    return job["spec"]["template"]["spec"]["containers"][0]


def test_nested_arguments_arrive_exactly_or_are_refused(bench):
    """No dict, list or None among the arguments is dropped in silence."""
    kwargs = {
        "trainer_kwargs": {"lr": [1e-3, None], "deep": {"er": True}},
        "none": None,
        "flag": False,
    }
    entries = container_of(job_of(bench, kwargs=kwargs))["env"]
    assert (
        spec_from_environment({e["name"]: e["value"] for e in entries if "value" in e}).kwargs
        == kwargs
    )
    with pytest.raises(InvalidRequestError, match=r"entrypoint_args\.a is a builtins\.tuple"):
        job_of(bench, kwargs={"a": (1, 2)})


def test_arguments_set_no_variables_of_the_environment(bench):
    """Arguments cannot override PATH, AWS_* or the launch's own variables."""
    plain = {entry["name"] for entry in container_of(job_of(bench))["env"]}
    kwargs = {
        "path": "/x",
        "world_size": 99,
        "replica_rank": 5,
        "aws_region": "x",
        "ld_library_path": "x",
    }
    assert {entry["name"] for entry in container_of(job_of(bench, kwargs=kwargs))["env"]} == plain
    for env in (
        {"REPLICA_WORLD_SIZE": "1"},
        {"REPLICA_RANK": "1"},
        {"a-b": "1"},
        {"A": 1},
        {"A": "x" * 140_000},
    ):
        with pytest.raises(InvalidRequestError):
            job_of(bench, env=env)


@pytest.mark.parametrize("name", ["My_Run", "a" * 60, "-a", "a.b", ""])
def test_a_run_id_that_no_job_can_have_is_refused_before_any_call(bench, name):
    """Nothing is sent to find out that a name is wrong."""
    with pytest.raises(InvalidRequestError, match="is not allowed"):
        bench.launch(4, run_id=name)
    with pytest.raises(InvalidRequestError):
        EKSExecutor("image", run_id=name or "A").plan(4, "a:b")
    assert len(bench.stand_in.calls) == 0


def test_gpus_have_counts_and_no_pinned_instance_type(bench):
    """Requests equal limits, and the caller's tolerations stay."""
    toleration = {"key": "team", "operator": "Exists"}
    job = job_of(
        bench,
        gpu="L40S:4",
        executor=bench.executor(tolerations=[toleration], shm_size="8Gi", efa=1),
    )
    resources = container_of(job)["resources"]
    assert resources["limits"]["nvidia.com/gpu"] == "4"
    assert resources["requests"] == resources["limits"]
    pod = job["spec"]["template"]["spec"]
    assert {entry["key"] for entry in pod["tolerations"]} == {"team", "nvidia.com/gpu"}
    text = json.dumps(pod["affinity"])
    assert all(
        kind in text
        for kind in (
            "g6e.12xlarge",
            "g6e.24xlarge",
            "g6e.48xlarge",
            "karpenter.k8s.aws",
            "eks.amazonaws.com",
        )
    )
    assert "g6e.xlarge" not in text
    assert "nodeSelector" not in pod
    with pytest.raises(InvalidRequestError, match="known are"):
        job_of(bench, gpu="GB300")


def test_the_deadline_adds_the_wait_to_the_timeout(bench):
    """The Job's own clock counts pulls and pending pods, which the timeout does not."""
    job = job_of(bench, timeout=100, max_restarts=2, executor=bench.executor(pending_timeout=600))
    assert job["spec"]["activeDeadlineSeconds"] == 900
    entries = container_of(job)["env"]
    assert (
        spec_from_environment({e["name"]: e["value"] for e in entries if "value" in e}).timeout
        == 100
    )
    assert re.search(r"pending_timeout \+ timeout", README)


def test_numbers_reach_the_cluster_in_the_types_that_it_takes(bench):
    """The newest client's models refuse a float where Kubernetes wants a whole number."""
    run = bench.launch(1, timeout=10.5, cpu=2, memory="1e9", start=False)
    assert type(bench.world.job("run-1")["spec"]["activeDeadlineSeconds"]) is int
    assert run.states() == ["pending"]


@pytest.mark.sampled
@pytest.mark.parametrize("refusal", ["forbidden", "unauthorized"])
@pytest.mark.parametrize("seen", [True, False])
def test_a_job_whose_answer_was_lost_is_found_though_another_try_is_refused(bench, refusal, seen):
    """Its own Job may fill the quota that refuses the next one."""
    bench.stand_in.faults.add("ambiguous", **JOBS)
    bench.stand_in.faults.add(refusal, times=None, **JOBS)
    if not seen:
        bench.stand_in.faults.add("forbidden", verb="get", resource="jobs", times=None)
        with pytest.raises(LaunchError, match="Whether the Job run-1 was created is not known"):
            bench.launch(1, start=False)
        return
    run = bench.launch(1, start=False)
    bench.stand_in.faults.clear()
    assert run.states() == ["pending"]


def test_a_refusal_after_a_lost_request_is_what_it_says(bench):
    bench.stand_in.faults.add("cut", **JOBS)
    bench.stand_in.faults.add("forbidden", times=None, **JOBS)
    with pytest.raises(ForbiddenError, match="cannot create Job"):
        bench.launch(1, start=False)

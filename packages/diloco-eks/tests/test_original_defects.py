"""The defects that an earlier executor for EKS had, each as a test that fails on them."""

import json
import re
from pathlib import Path

import pytest

from diloco_eks import EKSExecutor
from diloco_protocol import (
    BackendError,
    ForbiddenError,
    InvalidRequestError,
    Reason,
    ReplicaNotFoundError,
    UnavailableError,
    spec_from_environment,
)

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def job_of(bench, **options):
    """The Job that a launch creates."""
    executor = options.pop("executor", None) or bench.executor()
    (job,) = executor.plan(
        options.pop("n", 2), "trainer:train", options.pop("kwargs", None), **options
    ).requests
    return job


def container_of(job):
    return job["spec"]["template"]["spec"]["containers"][0]


def test_e1_no_record_is_no_cancel(bench, report):
    """E1: after the TTL, or in another namespace, everything read as cancelled."""
    run = bench.launch(1, executor=bench.executor(ttl_seconds_after_finished=10))
    run.pod(0).succeed(report()[0])
    bench.world.settle(within=20)
    with pytest.raises(ReplicaNotFoundError):
        run.executor.poll(run.handles[0])
    (result,) = run.executor.collect(run.handles, timeout=1)
    assert (result["status"], result["reason"]) == ("failed", "lost")


def test_e2_a_pending_rank_is_not_running(bench):
    """E2: one active pod made every rank "running", those that could not start too."""
    run = bench.launch(3, start=False)
    run.pod(0).start()
    run.pod(1).image_error()
    bench.world.settle()
    assert run.states() == ["running", "pending", "pending"]
    assert run.describe(1).reason is Reason.IMAGE


def test_e3_a_rank_that_is_being_ended_is_not_pending(bench):
    """E3: while a failed Job's pods ended, "running" went back to "pending"."""
    run = bench.launch(3)
    run.pod(0).ignore_term()
    run.pod(1).fail(1)
    told = []
    for _ in range(60):
        bench.world.advance(0.5)
        told.append(str(run.describe(0).state))
    assert "pending" not in told
    assert list(dict.fromkeys(told)) == ["running", "failed"]


def test_e4_a_complete_job_leaves_no_rank_pending(a_job):
    """E4: with a success policy, ranks that were not listed stayed "pending" for ever."""
    from diloco_eks._facts import read_job
    from diloco_eks._states import map_states

    complete = {"type": "Complete", "status": "True", "reason": "SuccessPolicy"}
    job = read_job(a_job(2, {"completedIndexes": "0", "conditions": [complete]}))
    assert [str(status.state) for status, _ in map_states(job, [], range(2)).values()] == [
        "succeeded",
        "failed",
    ]


def test_e5_the_culprit_is_known(bench):
    """E5: one rank's failure was reported of all ranks alike."""
    run = bench.launch(3)
    run.pod(1).fail(7)
    bench.world.settle()
    assert [run.describe(rank).reason for rank in range(3)] == [
        Reason.GANG_FAILED,
        Reason.ERROR,
        Reason.GANG_FAILED,
    ]
    assert [run.describe(rank).exit_code for rank in range(3)] == [None, 7, None]


def test_e6_a_node_drain_is_no_failure(bench):
    """E6: an eviction ended the run."""
    run = bench.launch(2)
    run.pod(0).evict()
    bench.world.settle(within=30)
    run.pod(0).start()
    assert run.states() == ["running", "running"]
    assert run.describe(0).attempt == 2
    template = job_of(bench)["spec"]["template"]
    assert template["metadata"]["annotations"]["karpenter.sh/do-not-disrupt"] == "true"


def test_e7_scheduling_is_not_called_atomic(bench):
    """E7: the documentation claimed gang scheduling; Kueue gives it."""
    assert re.search(r"not\s+gang-scheduled", README)
    assert (
        job_of(bench, executor=bench.executor(queue="gpus"))["metadata"]["labels"][
            "kueue.x-k8s.io/queue-name"
        ]
        == "gpus"
    )


def test_e8_cancelled_means_gone_and_the_evidence_stays(bench, report):
    """E8: cancel deleted the Job at once; pods lived on unseen, logs and evidence were lost."""
    run = bench.launch(2)
    run.pod(0).log("epoch 1\n")
    run.pod(0).succeed(report("kept")[0])
    bench.world.settle()
    run.executor.cancel(run.handles[0])
    pod = run.pod(1)
    while pod.alive:
        assert run.states() == ["succeeded", "running"]
        bench.world.advance(0.2)
    bench.world.settle()
    assert run.states() == ["succeeded", "cancelled"]
    assert run.executor.stream_logs(run.handles[0]) == "epoch 1"
    assert bench.world.job("run-1")


@pytest.mark.parametrize("verb", ["cancel", "purge"])
def test_e9_a_conflict_is_no_success(bench, verb):
    """E9: 409 was taken for "is being deleted already", so a failed teardown read as done."""
    run = bench.launch(1)
    if verb == "purge":
        run.executor.cancel(run.handles[0])
        bench.world.settle()
    cluster = run.executor._cluster
    refuse = refuses_with_conflict(cluster, "patch_job" if verb == "cancel" else "delete_job")
    with pytest.raises(BackendError, match=r"changes all the time|Precondition failed"):
        getattr(run.executor, verb)(run.handles[0])
    refuse()
    assert bench.world.job("run-1")["metadata"].get("deletionTimestamp") is None


def refuses_with_conflict(cluster, name):
    """Have another writer always be first: the real server then answers 409."""
    call = getattr(cluster, name)

    def late(space, job, *arguments):
        body = {"metadata": {"annotations": {"somebody": str(len(late.calls))}}}
        late.calls.append(type(cluster).patch_job(cluster, space, job, body))
        if name == "delete_job":
            uid, *_ = arguments
            return call(space, job, uid, late.calls[0]["metadata"]["resourceVersion"] + "0")
        return call(space, job, *arguments)

    late.calls = []
    setattr(cluster, name, late)
    return lambda: delattr(cluster, name)


def test_e10_a_later_job_of_the_same_name_is_spared(bench):
    """E10: a delete by name could hit a newer run."""
    old = bench.launch(1)
    old.executor.cancel(old.handles[0])
    bench.world.settle()
    old.executor.purge(old.handles[0])
    bench.world.settle()
    new = bench.launch(1)
    old.executor.cancel(old.handles[0])
    old.executor.purge(old.handles[0])
    with pytest.raises(BackendError):
        old.executor._cluster.delete_job("default", "run-1", old.handles[0].metadata["job_uid"])
    bench.world.settle()
    assert new.states() == ["running"]


def test_e11_nested_arguments_arrive(bench):
    """E11: dicts, lists and None were dropped in silence."""
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


def test_e12_arguments_are_no_environment(bench):
    """E12: arguments became upper-case variables, and overrode PATH, AWS_* and the launch's own."""
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
        {"WORLD_SIZE": "1"},
        {"REPLICA_RANK": "1"},
        {"a-b": "1"},
        {"A": 1},
        {"A": "x" * 140_000},
    ):
        with pytest.raises(InvalidRequestError):
            job_of(bench, env=env)


@pytest.mark.parametrize("name", ["My_Run", "a" * 60, "-a", "a.b", ""])
def test_e13_names_are_checked_before_the_call(bench, name):
    """E13: a run_id that no Job can have was sent as it was."""
    with pytest.raises(InvalidRequestError, match="is not allowed"):
        bench.launch(4, run_id=name)
    with pytest.raises(InvalidRequestError):
        EKSExecutor("image", run_id=name or "A").plan(4, "a:b")
    assert len(bench.stand_in.calls) == 0


def test_e14_a_lost_answer_and_a_passing_fault_cost_nothing(bench, report):
    """E14: create was not idempotent, and one transient error ended a collect of hours."""
    bench.stand_in.faults.add("ambiguous", verb="create", resource="jobs")
    run = bench.launch(2)
    assert run.executor.list_runs() == ["run-1"]
    for rank in (0, 1):
        run.pod(rank).succeed(report(rank)[0])
    for kind in ("server_error", "throttle", "unauthorized", "cut", "unavailable"):
        bench.stand_in.faults.add(kind)
    assert [r["result"] for r in run.executor.collect(run.handles, timeout=60)] == [0, 1]


def test_e15_runs_are_asked_once_and_kept_apart(bench, report):
    """E15: the same Job was read once per rank, and results were keyed by rank alone."""
    one = bench.launch(3, run_id="one")
    two = bench.launch(3, run_id="two", executor=one.executor)
    for run in (one, two):
        for rank in range(3):
            run.pod(rank).succeed(report([run.name, rank])[0])
    bench.world.settle()
    bench.stand_in.calls.clear()
    handles = [two.handles[2], one.handles[0], two.handles[2], one.handles[2]]
    results = one.executor.collect(handles, timeout=10)
    assert [r["result"] for r in results] == [["two", 2], ["one", 0], ["two", 2], ["one", 2]]
    assert (
        bench.stand_in.calls.count("get", "jobs"),
        bench.stand_in.calls.count("list", "pods"),
    ) == (2, 2)


def test_e16_no_right_to_the_status_subresource_is_needed(bench):
    """E16: polling needed RBAC on jobs/status."""
    for verb in ("get", "patch", "update"):
        bench.stand_in.access.deny(verb, "jobs/status")
    run = bench.launch(1)
    assert run.states() == ["running"]
    run.executor.cancel(run.handles[0])


def test_e17_logs_are_the_newest_attempts_or_an_error(bench):
    """E17: any error became a text in place of the log; any pod of the index was read."""
    run = bench.launch(1, max_restarts=1)
    run.pod(0).log("old life\n")
    run.pod(0).fail(1)
    bench.world.settle(within=30)
    run.pod(0).start()
    run.pod(0).log("new life\n")
    assert run.executor.stream_logs(run.handles[0]) == "new life"
    assert run.executor.stream_logs(run.handles[0], previous=True) == "old life"
    bench.stand_in.access.deny("get", "pods/log")
    with pytest.raises(ForbiddenError):
        run.executor.stream_logs(run.handles[0])


def test_e18_what_the_pods_say_is_told(bench, report):
    """E18: image errors, OOM, exit codes and messages never surfaced."""
    run = bench.launch(4, executor=bench.executor(on_replica_failure="continue"))
    run.pod(0).oom()
    run.pod(1).fail(9, report(exit_code=9, error="disk full", reason=Reason.ERROR)[0])
    run.pod(2).start_error()
    bench.world.settle()
    found = [run.describe(rank) for rank in range(3)]
    assert [status.reason for status in found] == [Reason.OOM, Reason.ERROR, Reason.START_FAILED]
    assert [status.exit_code for status in found] == [137, 9, 128]
    assert found[1].message == "disk full"
    assert "executable file not found" in found[2].message
    bench.world.schedulable = False
    waiting = bench.launch(1, run_id="run-2", start=False)
    assert waiting.describe(0).reason is Reason.UNSCHEDULABLE
    assert "Insufficient nvidia.com/gpu" in waiting.describe(0).message


def test_e19_gpus_have_counts_and_no_pinned_type(bench):
    """E19: one GPU always, on one instance type; requests differed from limits; the toleration was dropped."""
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


def test_e20_a_run_can_be_found_by_its_id(bench):
    """E20: there was no label of the run, its owner or version."""
    run = bench.launch(2, executor=bench.executor(owner="ada"))
    labels = run.pod(0).json["metadata"]["labels"]
    assert labels["diloco.dev/run-id"] == "run-1"
    assert labels["diloco.dev/owner"] == "ada"
    assert labels["app.kubernetes.io/version"]
    assert bench.executor().attach("run-1") == run.handles


def test_e21_the_deadline_counts_the_wait_beside_the_timeout(bench):
    """E21: the Job's deadline was the timeout itself, although it counts pulls and pending pods."""
    job = job_of(bench, timeout=100, max_restarts=2, executor=bench.executor(pending_timeout=600))
    assert job["spec"]["activeDeadlineSeconds"] == 900
    entries = container_of(job)["env"]
    assert (
        spec_from_environment({e["name"]: e["value"] for e in entries if "value" in e}).timeout
        == 100
    )
    assert re.search(r"pending_timeout \+ timeout", README)


def test_e22_malformed_indexes_are_an_error(bench, a_job):
    """E22: tokens that made no sense were dropped, so a rank kept a wrong state."""
    from diloco_eks._facts import read_job

    with pytest.raises(BackendError, match="lists the indexes"):
        read_job(a_job(4, {"completedIndexes": "0,x-2"}))
    run = bench.launch(2)
    assert "rank" not in run.handles[1].metadata


def test_e23_numbers_of_the_wrong_type_never_reach_the_client(bench):
    """E23: timeout=10.5 failed inside the newest client's models."""
    run = bench.launch(1, timeout=10.5, cpu=2, memory="1e9", start=False)
    assert type(bench.world.job("run-1")["spec"]["activeDeadlineSeconds"]) is int
    assert run.states() == ["pending"]


def test_e24_the_documentation_tells_irsa_from_pod_identity():
    """E24: it said that Pod Identity injects AWS_WEB_IDENTITY_TOKEN_FILE."""
    text = " ".join(README.split())
    assert "IRSA sets `AWS_ROLE_ARN` and `AWS_WEB_IDENTITY_TOKEN_FILE`" in text
    assert (
        "Pod Identity sets `AWS_CONTAINER_CREDENTIALS_FULL_URI` and `AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE`"
        in text
    )


def test_e25_the_client_is_ours_and_the_pod_can_be_shaped(bench, tmp_path):
    """E25: the global configuration was changed; no context; pull secrets, volumes and the like were out of reach."""
    from kubernetes import client

    before = client.Configuration.get_default_copy()
    overlay = {
        "spec": {
            "imagePullSecrets": [{"name": "pull"}],
            "priorityClassName": "high",
            "securityContext": {"runAsUser": 1000},
            "automountServiceAccountToken": True,
            "volumes": [{"name": "data", "emptyDir": {}}],
        }
    }
    context = bench.stand_in.kubeconfig_dict()["current-context"]
    run = bench.launch(1, executor=bench.executor(context=context, pod_overlay=overlay))
    assert client.Configuration.get_default_copy().host == before.host
    pod = run.pod(0).json["spec"]
    assert pod["imagePullSecrets"] == [{"name": "pull"}]
    assert pod["securityContext"]["runAsUser"] == 1000
    assert pod["automountServiceAccountToken"] is True
    with pytest.raises(BackendError) as caught:
        EKSExecutor("image", kubeconfig=tmp_path / "none").list_runs()
    assert not isinstance(caught.value, UnavailableError)

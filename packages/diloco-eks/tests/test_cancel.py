"""Cancel: one step, the evidence stays, and "cancelled" means that no pod is left."""

import pytest

from diloco_eks._state._reading import read_job
from diloco_eks._verbs._cancel import cancel_patch
from diloco_protocol import (
    BackendError,
    FolderJournal,
    ForbiddenError,
    Reason,
    ReplicaNotFoundError,
    UnavailableError,
)


def test_a_cancel_takes_the_run_and_keeps_what_it_did(bench, report):
    run = bench.launch(3)
    run.pod(0).log("trained\n")
    run.pod(0).succeed(report("done")[0])
    bench.world.settle()
    run.executor.cancel(run.handles[1])
    bench.world.advance(0.3)
    assert run.states() == ["succeeded", "running", "running"]
    assert run.describe(1).stopping
    assert run.describe(1).reason is Reason.CANCEL_REQUESTED
    results = run.executor.collect(run.handles, timeout=60)
    assert [(r["status"], r["exit_code"], r["reason"]) for r in results] == [
        ("succeeded", 0, "completed"),
        ("cancelled", None, "cancel_requested"),
        ("cancelled", None, "cancel_requested"),
    ]
    assert results[0]["result"] == "done"
    assert run.executor.stream_logs(run.handles[0]) == "trained"
    assert bench.executor().collect(run.handles, timeout=1) == results


def test_cancelled_is_said_when_the_last_pod_is_gone(bench):
    run = bench.launch(2)
    run.pod(0).ignore_term()
    run.executor.cancel(run.handles[0])
    told = set()
    while any(pod.alive for pod in bench.pods(run.handles[0])):
        told.add(tuple(run.states()))
        bench.world.advance(0.5)
    assert told == {("running", "running")}
    bench.world.settle()
    assert run.states() == ["cancelled", "cancelled"]


def test_cancel_may_be_repeated(bench):
    run = bench.launch(2)
    for _ in range(2):
        run.executor.cancel(run.handles[0])
    assert bench.stand_in.calls.count("patch", "jobs") == 1
    bench.world.settle()
    bench.executor().cancel(run.handles[1])
    assert bench.stand_in.calls.count("patch", "jobs") == 1
    assert run.states() == ["cancelled"] * 2


def test_a_run_is_cancelled_by_its_name_in_one_call(bench):
    run, other = bench.launch(3, run_id="sweep-1"), bench.launch(2, run_id="sweep-10")
    assert (run.executor.exists("sweep-1"), run.executor.exists("sweep")) == (True, False)
    bench.executor().cancel_run("sweep-1")
    assert bench.stand_in.calls.count("patch", "jobs") == 1
    bench.world.settle()
    assert run.states() == ["cancelled"] * 3
    assert "cancelled" not in other.states()
    with pytest.raises(ReplicaNotFoundError, match="no run 'sweep'"):
        run.executor.cancel_run("sweep")


def test_whether_a_run_exists_is_not_said_without_an_answer(bench):
    bench.launch(1, run_id="sweep-1")
    bench.stand_in.access.deny("get", "jobs")
    with pytest.raises(ForbiddenError):
        bench.executor().exists("sweep-1")


@pytest.mark.parametrize("end", ["succeed", "fail"])
def test_what_has_ended_stays_as_it_is(bench, report, end):
    run = bench.launch(1)
    getattr(run.pod(0), end)()
    bench.world.settle()
    before = run.describe(0)
    run.executor.cancel(run.handles[0])
    bench.world.settle()
    assert run.describe(0) == before
    assert bench.stand_in.calls.count("patch", "jobs") == 0


def test_what_is_decided_is_not_called_cancelled(punctual_bench):
    run = punctual_bench.launch(2)
    run.pod(0).ignore_term()
    run.pod(1).fail(3)
    punctual_bench.world.advance(2.5)
    assert run.describe(0).stopping
    run.executor.cancel(run.handles[0])
    punctual_bench.world.settle(within=60)
    assert [run.describe(rank).reason for rank in (0, 1)] == [Reason.GANG_FAILED, Reason.ERROR]


def test_pods_that_wait_are_cancelled_too(bench):
    bench.world.schedulable = False
    run = bench.launch(2, start=False)
    assert run.describe(0).reason is Reason.UNSCHEDULABLE
    run.executor.cancel(run.handles[0])
    bench.world.settle(within=60)
    assert run.states() == ["cancelled"] * 2


def test_a_run_that_is_gone_is_passed_over(bench):
    run = bench.launch(1)
    run.executor.cancel(run.handles[0])
    bench.world.settle(within=4000, most=5000)
    with pytest.raises(ReplicaNotFoundError):
        run.executor.poll(run.handles[0])
    run.executor.cancel(run.handles[0])


def test_a_refusal_is_told_and_changes_nothing(bench):
    run = bench.launch(1)
    bench.stand_in.access.deny("patch", "jobs")
    with pytest.raises(ForbiddenError, match='cannot patch resource "jobs"'):
        run.executor.cancel(run.handles[0])
    bench.world.settle()
    assert run.states() == ["running"]
    bench.stand_in.access.allow("patch", "jobs")
    run.executor.cancel(run.handles[0])
    bench.world.settle()
    assert run.states() == ["cancelled"]


@pytest.mark.parametrize("verb", ["get", "patch"])
def test_faults_are_waited_out_or_told(bench, verb):
    run = bench.launch(1)
    bench.stand_in.faults.add("server_error", verb=verb, resource="jobs", times=2)
    run.executor.cancel(run.handles[0])
    bench.world.settle()
    assert run.states() == ["cancelled"]
    run = bench.launch(1, run_id="run-2")
    bench.stand_in.faults.add("cut", verb=verb, resource="jobs", times=None)
    with pytest.raises(UnavailableError):
        run.executor.cancel(run.handles[0])
    bench.stand_in.faults.clear()
    bench.world.settle()
    assert run.states() == ["running"]


def test_a_cancel_whose_answer_is_lost(bench):
    run = bench.launch(1)
    bench.stand_in.faults.add("ambiguous", verb="patch", resource="jobs")
    run.executor.cancel(run.handles[0])
    bench.world.settle()
    assert run.states() == ["cancelled"]


def test_the_version_makes_it_one_step(bench, a_job):
    run = bench.launch(1)
    cluster = run.executor._cluster
    job = cluster.read_job("default", "run-1")
    patch = cancel_patch(read_job(job), job, "now")
    cluster.patch_job("default", "run-1", {"metadata": {"annotations": {"somebody": "else"}}})
    with pytest.raises(Exception, match="the object has been modified"):
        cluster.patch_job("default", "run-1", patch)
    assert cancel_patch(read_job(a_job(suspend=True)), a_job(suspend=True), "now")["spec"] == {
        "activeDeadlineSeconds": 1,
        "suspend": False,
        "parallelism": 0,
    }
    queued = a_job(suspend=True, queue="gpus")
    assert "spec" not in cancel_patch(read_job(queued), queued, "now")


def suspend(bench, name="run-1", value=True):
    bench.executor()._cluster.patch_job("default", name, {"spec": {"suspend": value}})
    bench.world.settle()


def test_a_suspended_run_is_cancelled_and_starts_no_pod(bench):
    run = bench.launch(2)
    suspend(bench)
    assert run.describe(0).reason is Reason.QUEUED
    assert run.states() == ["pending"] * 2
    run.executor.cancel(run.handles[0])
    bench.world.settle()
    assert run.states() == ["cancelled"] * 2
    assert bench.pods(run.handles[0]) == []
    bench.world.settle(within=4000, most=5000)
    with pytest.raises(ReplicaNotFoundError):  # it has finished, so its TTL has collected it
        bench.executor().poll(run.handles[0])
    assert run.states() == ["cancelled"] * 2  # who saw it end still knows


def test_a_queued_run_without_a_workload_is_deleted(bench):
    """No Kueue to ask: the Job, which has no pods, is deleted as it is."""
    run = bench.launch(2, start=False)
    labels = {"kueue.x-k8s.io/queue-name": "gpus"}
    run.executor._cluster.patch_job("default", run.name, {"metadata": {"labels": labels}})
    suspend(bench)
    run.executor.cancel(run.handles[0])
    bench.world.settle()
    with pytest.raises(ReplicaNotFoundError):
        run.executor.poll(run.handles[0])
    assert bench.world.pods() == []


def test_the_ttl_is_no_cancel(bench, report, tmp_path):
    journal = FolderJournal(tmp_path / "journal")
    run = bench.launch(1, executor=bench.executor(journal=journal, ttl_seconds_after_finished=60))
    run.pod(0).succeed(report({"loss": 1})[0])
    (before,) = run.executor.collect(run.handles, timeout=60)
    bench.world.settle(within=100, most=200)
    for executor in (bench.executor(), bench.executor()):
        with pytest.raises(ReplicaNotFoundError, match="its TTL is over"):
            executor.poll(run.handles[0])
        (lost,) = executor.collect(run.handles, timeout=5)
        assert (lost["status"], lost["reason"], lost["exit_code"]) == ("failed", "lost", None)
    assert bench.executor(journal=journal).collect(run.handles, timeout=5) == [before]


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


def test_cancelled_is_said_when_the_pods_are_gone_and_the_evidence_stays(bench, report):
    """Deleting the Job at once would leave pods running unseen, and lose logs and evidence."""
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
def test_a_conflict_is_not_taken_for_success(bench, verb):
    """A 409 does not mean that the Job is being deleted already."""
    run = bench.launch(1)
    if verb == "purge":
        run.executor.cancel(run.handles[0])
        bench.world.settle()
    cluster = run.executor._cluster
    refuse = refuses_with_conflict(cluster, "patch_job" if verb == "cancel" else "delete_job")
    with pytest.raises(
        BackendError, match=r"another client changed it each time|Precondition failed"
    ):
        getattr(run.executor, verb)(run.handles[0])
    refuse()
    assert bench.world.job("run-1")["metadata"].get("deletionTimestamp") is None


def test_a_later_job_of_the_same_name_is_spared(bench):
    """A handle ends and deletes its own run only, never a newer one by its name."""
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

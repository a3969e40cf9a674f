"""Runs in a queue: Kueue holds a Job by suspending it, and undoes what others do to that."""

import pytest

from diloco_localcloud import KubernetesStandIn
from diloco_protocol import InvalidRequestError, Reason, ReplicaNotFoundError, UnavailableError


@pytest.fixture(params=["v1beta1", "v1beta2"])
def bench(request, a_bench, tmp_path):
    with KubernetesStandIn(kueue=request.param) as stand_in:
        bench = a_bench(stand_in, tmp_path)
        stand_in.world.add_queue("gpus")
        yield bench
        bench.close()


def queued(bench):
    return bench.launch(2, start=False, executor=bench.executor(queue="gpus"))


def admit(bench, run):
    bench.world.admit("run-1")
    bench.world.settle()
    for pod in bench.pods(run.handles[0]):
        pod.start()


def active(bench, run):
    (workload,) = run.executor._cluster.list_workloads(
        "default", run.handles[0].metadata["job_uid"]
    )
    return workload["spec"]["active"]


def test_a_queued_run_waits_runs_and_is_preempted(bench):
    run = queued(bench)
    assert [(str(s.state), s.reason) for s in (run.describe(0), run.describe(1))] == [
        ("pending", Reason.QUEUED)
    ] * 2
    assert "gpus" in run.describe(0).message
    admit(bench, run)
    assert [run.describe(0).state, run.describe(0).attempt] == ["running", 1]
    bench.world.preempt("run-1")
    bench.world.settle()
    assert [run.describe(0).state, run.describe(0).attempt, run.describe(0).reason] == [
        "pending",
        2,
        Reason.QUEUED,
    ]
    admit(bench, run)
    assert [run.describe(0).state, run.describe(0).attempt] == ["running", 2]


def test_a_queued_run_is_cancelled_in_the_queue(bench):
    run = queued(bench)
    run.executor.cancel(run.handles[0])
    assert active(bench, run) is False
    bench.world.settle()
    assert run.states() == ["cancelled"] * 2
    job = bench.world.job("run-1")
    assert job["spec"]["suspend"] is True  # Kueue would undo anything else
    assert job["spec"]["activeDeadlineSeconds"] > 1
    run.executor.cancel(run.handles[1])
    run.executor.purge(run.handles[0])
    bench.world.settle()
    with pytest.raises(ReplicaNotFoundError):
        run.executor.poll(run.handles[0])


def test_a_run_that_kueue_has_admitted_is_cancelled_as_any_other(bench):
    run = queued(bench)
    admit(bench, run)
    run.executor.cancel(run.handles[0])
    bench.world.settle()
    assert run.states() == ["cancelled"] * 2
    assert active(bench, run) is True


def test_a_cancel_that_stopped_half_way_is_finished_by_the_next(bench):
    run = queued(bench)
    bench.stand_in.faults.add("server_error", resource="workloads", times=None)
    with pytest.raises(UnavailableError, match="list Workloads in default"):
        run.executor.cancel(run.handles[0])
    bench.stand_in.faults.clear()
    assert active(bench, run) is True
    assert run.states() == ["pending"] * 2  # Kueue may still start it
    run.executor.cancel(run.handles[0])
    bench.world.settle()
    assert active(bench, run) is False
    assert run.states() == ["cancelled"] * 2


def test_a_run_that_is_admitted_while_it_is_cancelled(bench, monkeypatch):
    """The Job has changed since it was read, so the next look finds it running."""
    run = queued(bench)
    stop = run.executor._cluster.stop_workload

    def late(*given):
        admit(bench, run)
        stop(*given)

    monkeypatch.setattr(run.executor._cluster, "stop_workload", late)
    run.executor.cancel(run.handles[0])
    bench.world.settle()
    assert run.states() == ["cancelled"] * 2


def test_a_cancelled_run_that_somebody_lets_go_on(bench):
    """It is not cancelled while it has pods, whoever asks; and the next cancel ends it."""
    run = queued(bench)
    run.executor.cancel(run.handles[0])
    bench.world.settle()
    assert run.states() == ["cancelled"] * 2
    (workload,) = run.executor._cluster.list_workloads(
        "default", run.handles[0].metadata["job_uid"]
    )
    path = run.executor._cluster._path("Workload", "default", workload["metadata"]["name"])
    bench.create(path, {"spec": {"active": True}}, "PATCH", "application/merge-patch+json")
    bench.world.settle()
    admit(bench, run)
    assert run.states() == ["running"] * 2
    assert run.describe(0).stopping
    bench.executor().cancel(run.handles[0])
    bench.world.settle(within=60.0)
    assert run.states() == ["cancelled"] * 2
    assert not any(pod.phase in {"Pending", "Running"} for pod in bench.pods(run.handles[0]))


def test_a_workload_that_only_carries_the_label_is_left_alone(bench, monkeypatch):
    """It could be another user's; and the run would be cancelled while Kueue may start it."""
    run = queued(bench)
    cluster = run.executor._cluster
    real, stopped = cluster._one, []

    def relabelled(verb, kind, *asked, **options):
        answer = real(verb, kind, *asked, **options)
        if (verb, kind) == ("list", "Workload"):
            for workload in answer["items"]:
                workload["metadata"]["ownerReferences"] = [{"uid": "another", "controller": True}]
        return answer

    monkeypatch.setattr(cluster, "_one", relabelled)
    monkeypatch.setattr(cluster, "stop_workload", lambda *place: stopped.append(place))
    run.executor.cancel(run.handles[0])
    bench.world.settle()
    assert stopped == []
    assert bench.world.pods() == []
    with pytest.raises(ReplicaNotFoundError):
        run.executor.poll(run.handles[0])


def test_a_workload_that_takes_the_name_of_another_is_left_alone(bench, monkeypatch):
    """It appears after the look, and is another user's."""
    run = queued(bench)
    cluster = run.executor._cluster
    stop, put = cluster.stop_workload, []

    def late(space, workload):
        if not put:
            name = workload["metadata"]["name"]
            bench.create(cluster._path("Workload", "default", name), {}, "DELETE")
            body = {**workload, "metadata": {"name": name}}
            put.append(bench.create(cluster._path("Workload", "default"), body))
        stop(space, workload)

    monkeypatch.setattr(cluster, "stop_workload", late)
    run.executor.cancel(run.handles[0])
    name = put[0]["metadata"]["name"]
    left = bench.create(cluster._path("Workload", "default", name), None, "GET")
    assert (left["metadata"]["uid"], left["spec"]["active"]) == (put[0]["metadata"]["uid"], True)


def test_workloads_that_may_not_be_touched(bench):
    run = queued(bench)
    bench.stand_in.access.deny("list", "workloads")
    run.executor.cancel(run.handles[0])
    bench.world.settle()
    assert bench.world.pods() == []
    with pytest.raises(ReplicaNotFoundError):
        run.executor.poll(run.handles[0])


VERBS = {
    "launch": lambda executor: executor.launch_replicas(1, "a:b", run_id="run-1"),
}


@pytest.mark.sampled
@pytest.mark.parametrize("verb", VERBS)
def test_a_queue_that_is_not_there_is_refused(bench, verb):
    with pytest.raises(InvalidRequestError, match=r"queue='none': there is no such LocalQueue"):
        VERBS[verb](bench.executor(queue="none"))
    assert bench.executor().list_runs() == []
    VERBS[verb](bench.executor(queue="gpus"))


@pytest.mark.parametrize("verb", VERBS)
def test_a_queue_without_kueue_is_refused(a_bench, tmp_path, verb):
    with KubernetesStandIn() as stand_in:
        bench = a_bench(stand_in, tmp_path)
        executor = bench.executor(queue="gpus")
        with pytest.raises(InvalidRequestError, match="the cluster has no Kueue"):
            VERBS[verb](executor)
        assert executor.list_runs() == []
        (finding,) = [each for each in executor.check(1) if each.subject == "queue"]
        assert finding.ok is False
        bench.close()


def test_check_looks_at_the_queue(bench, caplog):
    def found(queue):
        return {each.subject: each.ok for each in bench.executor(queue=queue).check(1)}

    assert found("gpus")["queue"] is True
    assert found("none")["queue"] is False
    bench.stand_in.access.deny("get", "localqueues")
    assert found("gpus")["queue"] is None
    queued(bench)
    assert "whether the queue default/gpus exists cannot be checked" in caplog.text

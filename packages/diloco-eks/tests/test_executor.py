"""A run's life, over real HTTP with the real client."""

import inspect

import pytest

from diloco_eks import EKSExecutor
from diloco_protocol import (
    InvalidRequestError,
    Reason,
    ReplicaHandle,
    ReplicaNotFoundError,
    ReplicaState,
    executors,
)


def test_a_run_from_launch_to_results(bench, report):
    run = bench.launch(3, start=False)
    assert [handle.rank for handle in run.handles] == [0, 1, 2]
    assert run.states() == ["pending"] * 3
    for pod in bench.pods(run.handles[0]):
        pod.start()
    assert run.states() == ["running"] * 3
    for rank in range(3):
        run.pod(rank).succeed(report({"rank": rank, "loss": [0.5, None]})[0])
    results = run.executor.collect(run.handles, timeout=60)
    assert [(r["rank"], r["status"], r["exit_code"], r["result"]) for r in results] == [
        (rank, "succeeded", 0, {"rank": rank, "loss": [0.5, None]}) for rank in range(3)
    ]
    assert results[0]["job_name"] == "run-1"
    assert run.executor.collect(run.handles, timeout=1) == results
    assert bench.executor().collect(run.handles, timeout=1) == results


def test_the_duration_is_the_containers(bench, report):
    run = bench.launch(1)
    started = bench.world.now()
    bench.world.advance(90)
    run.pod(0).succeed(report()[0])
    bench.world.settle()
    status = run.describe()
    assert status.finished_at - status.started_at == pytest.approx(90, abs=2)
    assert abs(status.started_at - started) < 10


def test_a_large_result_comes_through_the_log(bench, report):
    value = {"table": "x" * 50_000}
    message, lines = report(value)
    run = bench.launch(1)
    pod = run.pod(0)
    pod.log("epoch 1\nepoch 2\n")
    pod.log("\n".join(lines) + "\n")
    pod.succeed(message)
    bench.world.settle()
    (result,) = run.executor.collect(run.handles, timeout=10)
    assert result["result"] == value
    assert run.executor.stream_logs(run.handles[0], n_lines=5) == "epoch 1\nepoch 2"
    assert list(run.executor.log_iter(run.handles[0])) == ["epoch 1", "epoch 2"]


def test_a_result_that_is_lost_is_no_none(bench, report):
    message, lines = report({"table": "x" * 50_000})
    run = bench.launch(2)
    run.pod(0).log("\n".join(lines[:-1]) + "\n")
    run.pod(0).succeed(message)
    run.pod(1).succeed("")
    bench.world.settle()
    first, second = run.executor.collect(run.handles)
    assert (first["status"], first["exit_code"], first["result"]) == ("succeeded", 0, None)
    assert "the result is lost: " in first["error"]
    assert "1 of the 7 log lines" in first["error"]
    assert "reported no result" in second["error"]
    run.pod(1).delete()
    bench.world.settle()
    fresh = bench.executor()
    assert fresh.poll(run.handles[1]) is ReplicaState.SUCCEEDED
    (third,) = fresh.collect(run.handles[1:])
    assert "its pod has been removed" in third["error"]


def test_one_failure_ends_the_run_and_is_named(bench, report):
    run = bench.launch(3)
    run.pod(0).succeed(report("done")[0])
    bench.world.settle()
    run.pod(1).fail(
        7, report(exit_code=7, error="ValueError: no such data", reason=Reason.ERROR)[0]
    )
    bench.world.advance(2.5)
    assert [run.describe(0).state, run.describe(1).state] == ["succeeded", "failed"]
    assert (str(run.describe(2).state), run.describe(2).stopping) == ("running", True)
    results = run.executor.collect(run.handles, timeout=60)
    assert [(r["status"], r["reason"], r["exit_code"]) for r in results] == [
        ("succeeded", "completed", 0),
        ("failed", "error", 7),
        ("failed", "gang_failed", None),
    ]
    assert results[1]["error"] == "ValueError: no such data"
    assert "rank 1 failed" in results[2]["error"]
    assert "ValueError: no such data" in results[2]["error"]


def test_an_elastic_run_survives_a_loss(bench, report):
    run = bench.launch(3, executor=bench.executor(on_replica_failure="continue"))
    run.pod(1).oom()
    bench.world.settle()
    assert run.states() == ["running", "failed", "running"]
    assert (run.describe(1).reason, run.describe(1).exit_code) == (Reason.OOM, 137)
    for rank in (0, 2):
        run.pod(rank).succeed(report(rank)[0])
    results = run.executor.collect(run.handles, timeout=60)
    assert [r["status"] for r in results] == ["succeeded", "failed", "succeeded"]


def test_a_failed_replica_is_started_again(bench, report):
    run = bench.launch(2, max_restarts=1)
    run.pod(0).fail(1)
    bench.world.advance(1.5)
    assert run.describe(0).state is ReplicaState.RUNNING
    bench.world.settle(within=30)
    assert (str(run.describe(0).state), run.describe(0).attempt) == ("pending", 2)
    run.pod(0).start()
    assert (str(run.describe(0).state), run.describe(0).attempt) == ("running", 2)
    for rank in (0, 1):
        run.pod(rank).succeed(report(rank)[0])
    assert [r["attempt"] for r in run.executor.collect(run.handles, timeout=60)] == [2, 1]


def test_an_evicted_replica_is_started_again(bench):
    run = bench.launch(2)
    first = run.pod(0).name
    run.pod(0).evict()
    told = [(str(s.state), s.attempt) for s in (run.describe(0),)]
    for _ in range(40):
        bench.world.advance(0.5)
        status = run.describe(0)
        told.append((str(status.state), status.attempt))
    assert list(dict.fromkeys(told)) == [("running", 1), ("pending", 2)]
    assert run.pod(0).name != first
    run.pod(0).start()
    assert (str(run.describe(0).state), run.describe(0).attempt) == ("running", 2)
    assert run.describe(1).state is ReplicaState.RUNNING


def test_the_deadline_is_a_timeout(bench):
    run = bench.launch(2, timeout=100, executor=bench.executor(pending_timeout=50))
    bench.world.advance(151)
    bench.world.settle()
    assert [run.describe(rank).reason for rank in (0, 1)] == [Reason.TIMEOUT] * 2
    assert run.states() == ["failed"] * 2


def test_runs_are_found_again_from_elsewhere(bench):
    first = bench.launch(2, run_id="b-first", rank_offset=3, world_size=9)
    bench.world.advance(5)
    bench.launch(1, run_id="a-second")
    elsewhere = bench.executor()
    assert elsewhere.list_runs() == ["b-first", "a-second"]
    assert elsewhere.attach("b-first") == first.handles
    assert [handle.rank for handle in first.handles] == [3, 4]
    assert first.states(elsewhere) == ["running"] * 2
    with pytest.raises(ReplicaNotFoundError, match="no run 'none'"):
        elsewhere.attach("none")


def test_ranks_are_the_launchs_not_the_indexes(bench, report):
    run = bench.launch(2, rank_offset=3, world_size=9)
    run.pod(1).succeed(report("from rank 4")[0])
    bench.world.settle()
    assert run.states() == ["running", "succeeded"]
    run.pod(0).log("I am rank 3\n")
    assert run.executor.stream_logs(run.handles[0]) == "I am rank 3"
    run.pod(0).fail(9)
    (failed, _) = run.executor.collect(run.handles, timeout=60)
    assert (failed["rank"], failed["exit_code"]) == (3, 9)


def test_purge_waits_for_the_end_and_takes_all(bench):
    run = bench.launch(2)
    with pytest.raises(InvalidRequestError, match="2 replicas of run 'run-1' have not ended"):
        run.executor.purge(run.handles[0])
    run.executor.cancel(run.handles[0])
    bench.world.settle()
    assert run.states() == ["cancelled"] * 2
    run.executor.purge(run.handles[0])
    run.executor.purge(run.handles[1])
    bench.world.settle()
    assert bench.world.pods("run-1") == []
    with pytest.raises(ReplicaNotFoundError, match="purged, deleted, or its TTL"):
        run.executor.poll(run.handles[0])
    run.executor.purge(run.handles[0])


def test_purge_spares_a_later_run_of_the_same_name(bench):
    run = bench.launch(1)
    run.executor.cancel(run.handles[0])
    bench.world.settle()
    run.executor.purge(run.handles[0])
    bench.world.settle()
    again = bench.launch(1)
    run.executor.purge(run.handles[0])
    run.executor.cancel(run.handles[0])
    bench.world.settle()
    assert again.states() == ["running"]
    with pytest.raises(ReplicaNotFoundError):
        run.executor.poll(run.handles[0])


def test_the_constructors_values_are_defaults(bench):
    executor = bench.executor(backoff_limit=2, env={"A": "1", "B": "1"}, cpu_request="2")
    (job,) = executor.plan(1, "trainer:train", env={"B": "2"}).requests
    entries = {
        e["name"]: e.get("value") for e in job["spec"]["template"]["spec"]["containers"][0]["env"]
    }
    assert (entries["A"], entries["B"]) == ("1", "2")
    assert job["spec"]["backoffLimitPerIndex"] == 2
    (job,) = executor.plan(1, "trainer:train", max_restarts=0, cpu="8").requests
    assert job["spec"]["backoffLimitPerIndex"] == 0
    assert job["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]["cpu"] == "8"


def test_options_are_the_constructors(bench):
    names = [name for name in inspect.signature(EKSExecutor.__init__).parameters if name != "self"]
    assert [option.name for option in bench.executor().options()] == [
        name for name in names if name != "clock"
    ]


def test_it_is_found_among_the_installed_backends():
    found = executors()
    if "eks" not in found:
        pytest.skip("diloco-eks is on the path, but not installed")
    assert found["eks"].backend_name == "eks"


@pytest.mark.parametrize(
    "handle",
    [
        ReplicaHandle(0, "eks", {}),
        ReplicaHandle(
            0,
            "eks",
            {"first_rank": "x", "job_name": "a", "job_uid": "", "namespace": "d", "server": "s"},
        ),
    ],
)
def test_a_handle_that_leads_nowhere(bench, handle):
    executor = bench.executor()
    for verb in (
        executor.poll,
        executor.cancel,
        executor.purge,
        executor.stream_logs,
        lambda h: executor.collect([h]),
    ):
        with pytest.raises(InvalidRequestError, match="does not lead to a Job"):
            verb(handle)


def test_a_rank_that_the_job_does_not_have(bench):
    run = bench.launch(2)
    stranger = ReplicaHandle(2, "eks", run.handles[0].metadata, run_id="run-1", world_size=3)
    with pytest.raises(InvalidRequestError, match="ranks 0 to 1, and not 2"):
        run.executor.poll(stranger)


def test_no_threads_no_global_configuration(bench):
    from kubernetes import client

    before = client.Configuration.get_default_copy().host
    bench.launch(1)
    assert client.Configuration.get_default_copy().host == before


def test_a_run_whose_ttl_is_over_is_not_found_and_not_cancelled(bench, report):
    """A missing Job says nothing about how the run ended."""
    run = bench.launch(1, executor=bench.executor(ttl_seconds_after_finished=10))
    run.pod(0).succeed(report()[0])
    bench.world.settle(within=20)
    with pytest.raises(ReplicaNotFoundError):
        run.executor.poll(run.handles[0])
    (result,) = run.executor.collect(run.handles, timeout=1)
    assert (result["status"], result["reason"]) == ("failed", "lost")


def test_one_running_pod_does_not_make_every_rank_running(bench):
    """Ranks that cannot start are pending, and say why."""
    run = bench.launch(3, start=False)
    run.pod(0).start()
    run.pod(1).image_error()
    bench.world.settle()
    assert run.states() == ["running", "pending", "pending"]
    assert run.describe(1).reason is Reason.IMAGE


def test_a_rank_that_is_being_ended_never_goes_back_to_pending(bench):
    """While the pods of a failed Job end, its other ranks are still running."""
    run = bench.launch(3)
    run.pod(0).ignore_term()
    run.pod(1).fail(1)
    told = []
    for _ in range(60):
        bench.world.advance(0.5)
        told.append(str(run.describe(0).state))
    assert "pending" not in told
    assert list(dict.fromkeys(told)) == ["running", "failed"]


def test_only_the_rank_that_failed_has_its_exit_code(bench):
    """The failure of one rank is not reported as that of all ranks."""
    run = bench.launch(3)
    run.pod(1).fail(7)
    bench.world.settle()
    assert [run.describe(rank).reason for rank in range(3)] == [
        Reason.GANG_FAILED,
        Reason.ERROR,
        Reason.GANG_FAILED,
    ]
    assert [run.describe(rank).exit_code for rank in range(3)] == [None, 7, None]


def test_a_node_drain_begins_the_next_attempt_and_fails_nothing(bench):
    """An eviction does not end the run."""
    run = bench.launch(2)
    run.pod(0).evict()
    bench.world.settle(within=30)
    run.pod(0).start()
    assert run.states() == ["running", "running"]
    assert run.describe(0).attempt == 2
    (job,) = run.executor.plan(1, "trainer:train").requests
    template = job["spec"]["template"]
    assert template["metadata"]["annotations"]["karpenter.sh/do-not-disrupt"] == "true"


def test_a_lost_answer_and_passing_faults_cost_nothing(bench, report):
    """The create is idempotent, and no single fault ends a collect of hours."""
    bench.stand_in.faults.add("ambiguous", verb="create", resource="jobs")
    run = bench.launch(2)
    assert run.executor.list_runs() == ["run-1"]
    for rank in (0, 1):
        run.pod(rank).succeed(report(rank)[0])
    for kind in ("server_error", "throttle", "unauthorized", "cut", "unavailable"):
        bench.stand_in.faults.add(kind)
    assert [r["result"] for r in run.executor.collect(run.handles, timeout=60)] == [0, 1]


def test_each_run_is_asked_once_and_results_are_kept_apart(bench, report):
    """One read of the Job and one list of pods per run and look, however many ranks are collected."""
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


def test_exit_codes_reasons_and_messages_of_the_pods_are_told(bench, report):
    """Image errors, OOM kills, exit codes and the runner's message reach the caller."""
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


def test_a_run_can_be_found_by_its_id_and_its_labels(bench):
    """Pods carry the run, its owner and our version."""
    run = bench.launch(2, executor=bench.executor(owner="ada"), cohort="whole")
    labels = run.pod(0).json["metadata"]["labels"]
    assert (labels["diloco.dev/run-id"], labels["diloco.dev/cohort"]) == ("run-1", "whole")
    assert labels["diloco.dev/owner"] == "ada"
    assert labels["app.kubernetes.io/version"]
    assert bench.executor().attach("run-1") == run.handles

"""A run's life, over real HTTP with the real client: failures, restarts, evictions, deadlines."""

from diloco_protocol import (
    Reason,
    ReplicaState,
)


def test_one_failure_ends_the_run_and_is_named(punctual_bench, report):
    run = punctual_bench.launch(3)
    run.pod(0).succeed(report("done")[0])
    punctual_bench.world.settle()
    run.pod(1).fail(
        7, report(exit_code=7, error="ValueError: no such data", reason=Reason.ERROR)[0]
    )
    punctual_bench.world.advance(2.5)
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

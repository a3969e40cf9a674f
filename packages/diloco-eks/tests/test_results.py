"""What replicas return, and how they ended, reaches whoever collects."""

import pytest

from diloco_eks._state._reading import read_pod
from diloco_eks._state._verdict import read_message
from diloco_protocol import (
    ForbiddenError,
    Reason,
    ReplicaState,
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


def test_a_result_is_found_before_many_other_lines(bench, report):
    """What starts the runner may write behind it."""
    message, lines = report("x" * 20_000)
    run = bench.launch(1)
    run.pod(0).log("\n".join([*lines, *["bye"] * 200]) + "\n")
    run.pod(0).succeed(message)
    bench.world.settle()
    (found,) = run.executor.collect(run.handles, timeout=10)
    assert (found["result"], found["error"]) == ("x" * 20_000, None)


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


def test_a_result_that_may_not_be_read_holds_up_nobody(bench, report):
    message, lines = report("x" * 50_000)
    run = bench.launch(2)
    run.pod(0).log("\n".join(lines) + "\n")
    run.pod(0).succeed(message)
    bench.stand_in.access.deny("get", "pods/log")
    told = []

    def progress(known):
        told.append([str(status.state) for status in known.values()])
        if len(told) == 5:
            run.pod(1).succeed(report("done")[0])

    with pytest.raises(ForbiddenError, match="cannot get resource"):
        run.executor.collect(run.handles, timeout=100, progress=progress)
    assert told[-1] == ["succeeded", "succeeded"]
    (other,) = run.executor.collect(run.handles[1:], timeout=100)
    assert other["result"] == "done"
    bench.stand_in.access.allow("get", "pods/log")
    assert run.executor.collect(run.handles[:1])[0]["result"] == "x" * 50_000


def test_each_run_is_asked_once_and_results_are_kept_apart(bench, report):
    """One read of the Job and one list of pods per run and look, for any number of ranks."""
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


@pytest.mark.sampled
@pytest.mark.parametrize("kept", [0.3, 0.7, 0.99])
def test_a_damaged_report_concerns_its_rank_alone(bench, report, kept):
    """What a replica writes may be cut anywhere."""
    texts = [
        report(exit_code=7, error="x" * 900, reason=Reason.ERROR)[0],
        report("y" * 900)[0],
    ]
    first, second = (text[: int(len(text) * kept)] for text in texts)
    run = bench.launch(3, executor=bench.executor(on_replica_failure="continue"))
    run.pod(0).fail(7, first)
    run.pod(1).succeed(second)
    run.pod(2).succeed(report("whole")[0])
    failed, damaged, whole = run.executor.collect(run.handles, timeout=60)
    assert (failed["status"], failed["exit_code"], failed["reason"]) == ("failed", 7, "error")
    assert failed["error"] == "it exited with code 7: what its runner reported cannot be read"
    assert (damaged["status"], damaged["result"]) == ("succeeded", None)
    assert "what its runner reported cannot be read" in damaged["error"]
    assert (whole["result"], whole["error"]) == ("whole", None)


def test_what_is_longer_than_any_report_is_none(a_pod, report):
    text = report(exit_code=3, error="mine", reason=Reason.ERROR)[0]
    for message, read in ((text, True), (" " * 5000 + text[:-1] + " " * 5000 + "}", False)):
        pod = read_pod(a_pod(0, "Failed", {"terminated": {"exitCode": 3, "message": message}}))
        assert (read_message(pod) is not None) is read

"""Ending and finding runs: cancel, restarts, purge, handles in other places."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from importlib import metadata

import pytest
from local_lab import results_of, run_of

from diloco_local import LocalProcessExecutor
from diloco_local._processes import ProcessId
from diloco_protocol import (
    InvalidRequestError,
    Reason,
    ReplicaHandle,
    ReplicaNotFoundError,
    ReplicaState,
    get_executor,
)

pytestmark = pytest.mark.processes


def test_cancel_is_idempotent_and_has_the_scope_of_a_replica(waiting):
    run = waiting(2)
    for _ in range(3):
        run.executor.cancel(run.handle)
    assert results_of(run.executor, [run.handle])[0]["status"] == "cancelled"
    before = run.executor.describe(run.handle)
    run.executor.cancel(run.handle)
    assert run.executor.describe(run.handle) == before
    assert run.executor.poll(run.handles[1]) is ReplicaState.RUNNING
    run.go()
    assert results_of(run.executor, run.handles[1:])[0]["result"] == 1


@pytest.mark.parametrize(("function", "state"), [("echo", "succeeded"), ("fail", "failed")])
def test_a_cancel_changes_nothing_that_has_ended(make, function, state):
    executor = make()
    handles = executor.launch_replicas(1, f"trainer:{function}", {})
    first = results_of(executor, handles)
    executor.cancel(handles[0])
    assert results_of(executor, handles) == first
    assert first[0]["status"] == state


def test_a_success_that_wins_the_race_stays(waiting, make):
    run = waiting(function="polite", executor=make(grace=60.0))
    run.executor.cancel(run.handle)
    (result,) = results_of(run.executor, run.handles)
    assert (result["status"], result["exit_code"], result["result"]) == ("succeeded", 0, 0)


def test_an_exit_with_0_on_a_cancel_is_no_success(waiting, make):
    run = waiting(function="leaver", executor=make(grace=60.0))
    run.executor.cancel(run.handle)
    (result,) = results_of(run.executor, run.handles)
    assert (result["status"], result["result"]) == ("cancelled", None)
    status = run.executor.describe(run.handle)
    assert (status.exit_code, status.signal) == (143, "SIGTERM")


@pytest.mark.parametrize("how", ["removed", "damaged"])
def test_a_lost_result_is_said(make, tmp_path, how):
    executor = make()
    handles = executor.launch_replicas(2, "trainer:echo", {"a": 1})
    results_of(executor, handles)
    files = run_of(handles[0]).replica(0).attempt(1).outcome
    files.unlink() if how == "removed" else files.write_text("{")
    first, second = results_of(executor, handles)
    assert (first["status"], first["exit_code"], first["result"]) == ("succeeded", 0, None)
    assert first["error"].startswith("the result is lost: ")
    assert (second["result"], second["error"]) == ({"a": 1}, None)


def test_a_failure_leaves_its_siblings_alone(waiting):
    run = waiting(2)
    os.kill(run.pid(0), 9)
    assert results_of(run.executor, [run.handle])[0]["status"] == "failed"
    assert run.executor.poll(run.handles[1]) is ReplicaState.RUNNING


def test_restarts_are_counted_and_bounded(make):
    executor = make()
    handles = executor.launch_replicas(1, "trainer:until_attempt", {"number": 3}, max_restarts=2)
    (result,) = results_of(executor, handles)
    assert (result["status"], result["result"], result["attempt"]) == ("succeeded", 3, 3)
    assert list(executor.log_iter(handles[0], streams="stdout")) == [
        "attempt 1",
        "attempt 2",
        "attempt 3",
    ]
    handles = executor.launch_replicas(1, "trainer:until_attempt", {"number": 3}, max_restarts=1)
    (result,) = results_of(executor, handles)
    assert (result["status"], result["attempt"]) == ("failed", 2)
    assert "attempt 2 fails" in result["error"]


def test_who_was_replaced_is_not_started_again(make):
    """Started again, it would take the place back from the process that has it now."""
    executor = make()
    handles = executor.launch_replicas(1, "trainer:is_replaced", {}, max_restarts=2)
    (result,) = results_of(executor, handles)
    assert (result["status"], result["exit_code"], result["attempt"]) == ("failed", 79, 1)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("options", "told"),
    [({}, "0"), ({"max_restarts": 2}, "1"), ({"world_size": 2, "max_restarts": 2}, None)],
)
def test_replicas_are_told_whether_any_of_them_comes_back(make, options, told):
    executor = make()
    handles = executor.launch_replicas(1, "trainer:whether_it_comes_back", {}, **options)
    (result,) = results_of(executor, handles)
    assert (result["status"], result["result"]) == ("succeeded", told)


def test_a_timeout_is_per_attempt(overrunning):
    def both_attempts_were_up(run):
        results_of(run.executor, run.handles)
        return (run.signs / "up-0-2").exists()

    run = overrunning(both_attempts_were_up, max_restarts=1)
    (result,) = results_of(run.executor, run.handles)
    assert (result["status"], result["reason"], result["attempt"]) == ("failed", Reason.TIMEOUT, 2)


def test_a_cancelled_replica_is_not_started_again(waiting, folder):
    run = waiting(max_restarts=5)
    run.executor.cancel(run.handle)
    (result,) = results_of(run.executor, run.handles)
    assert (result["status"], result["attempt"]) == ("cancelled", 1)
    assert not (folder / "up-0-2").exists()


def test_purge_removes_what_has_ended_and_only_that(waiting, make, tmp_path):
    run = waiting(2, run_id="gone")
    run.executor.cancel(run.handle)
    results_of(run.executor, [run.handle])
    with pytest.raises(InvalidRequestError, match=r"1 replicas .* have not ended, such as rank 1"):
        run.executor.purge(run.handle)
    run.go()
    results_of(run.executor, run.handles)
    run.executor.purge(run.handle)
    run.executor.purge(run.handle)
    run.executor.cancel(run.handle)
    with pytest.raises(ReplicaNotFoundError):
        run.executor.poll(run.handle)
    assert results_of(run.executor, run.handles)[0]["reason"] == Reason.LOST
    assert run.executor.list_runs() == []
    # A new run of that name is another run: the old handle does not speak for it.
    (new,) = run.executor.launch_replicas(1, "trainer:echo", {}, run_id="gone")
    results_of(run.executor, [new])
    with pytest.raises(ReplicaNotFoundError):
        run.executor.poll(replace(run.handle, world_size=1))


def elsewhere(handle, **metadata):
    return ReplicaHandle(
        handle.rank,
        handle.backend_name,
        {**handle.metadata, **metadata},
        run_id=handle.run_id,
        world_size=handle.world_size,
    )


def test_a_handle_speaks_only_for_its_own_machine_and_root(make, tmp_path):
    executor = make()
    (handle,) = executor.launch_replicas(1, "trainer:echo", {})
    results_of(executor, [handle])
    for other, words in (
        (elsewhere(handle, host="somewhere-else"), "somewhere-else.*renamed"),
        (elsewhere(handle, root=str(tmp_path / "unmounted")), "is below the root"),
        (ReplicaHandle(0, "local_process", {}, run_id=handle.run_id), "lacks the metadata"),
        (ReplicaHandle(0, "eks", dict(handle.metadata), run_id=handle.run_id), "eks"),
    ):
        for verb in (
            executor.poll,
            executor.describe,
            executor.cancel,
            executor.purge,
            executor.stream_logs,
        ):
            with pytest.raises(InvalidRequestError, match=words):
                verb(other)
        with pytest.raises(InvalidRequestError, match=words):
            executor.collect([other], timeout=1)
    with pytest.raises(ReplicaNotFoundError):
        executor.poll(replace(handle, run_id="never-was"))
    with pytest.raises(ReplicaNotFoundError):
        executor.poll(replace(handle, rank=1, world_size=2))


def test_list_and_attach_from_another_executor(make):
    executor = make(run_id="demo")
    first = executor.launch_replicas(2, "trainer:echo", {})
    second = executor.launch_replicas(1, "trainer:echo", {})
    other = make()
    assert other.list_runs() == [first[0].run_id, second[0].run_id]
    assert all(name.startswith("demo-") for name in other.list_runs())
    assert other.attach(first[0].run_id) == first
    with pytest.raises(ReplicaNotFoundError, match="no-such-run"):
        other.attach("no-such-run")


def test_the_name_in_the_registry():
    try:
        metadata.distribution("diloco-local")
    except metadata.PackageNotFoundError:
        pytest.skip("diloco-local is on the path and not installed")
    assert get_executor("local_process") is LocalProcessExecutor


def statuses(executor, handles):
    return [str(executor.poll(handle)) for handle in handles]


def test_a_failure_stays_a_failure_however_often_it_is_asked_for(make, until):
    """Neither polling nor collecting twice turns it into a success."""
    executor = make()
    handles = executor.launch_replicas(2, "trainer:fail", {})
    until(lambda: statuses(executor, handles) == ["failed", "failed"])
    first = results_of(executor, handles)
    assert [(r["status"], r["exit_code"]) for r in first] == [("failed", 1)] * 2
    assert results_of(executor, handles) == first
    assert statuses(executor, handles) == ["failed", "failed"]


def test_polling_does_not_lose_results(make, until):
    """What was polled before it was collected still has its return value."""
    executor = make()
    handles = executor.launch_replicas(2, "trainer:echo", {"a": [1, {"b": None}]})
    until(lambda: statuses(executor, handles) == ["succeeded", "succeeded"])
    assert [r["result"] for r in results_of(executor, handles)] == [{"a": [1, {"b": None}]}] * 2


def test_what_was_cancelled_is_called_cancelled(waiting):
    """It is not a failure with exit code -15."""
    run = waiting()
    run.executor.cancel(run.handle)
    (result,) = results_of(run.executor, run.handles)
    assert (result["status"], result["exit_code"]) == ("cancelled", None)
    assert run.executor.poll(run.handle) is ReplicaState.CANCELLED
    assert run.executor.describe(run.handle).reason is Reason.CANCEL_REQUESTED
    assert run.executor.describe(run.handle).signal == "SIGTERM"


def test_a_second_launch_leaves_the_first_alone(waiting):
    """Its handles show their own replicas, and a cancel ends those and no others."""
    first = waiting()
    second = first.executor.launch_replicas(1, "trainer:echo", {"k": 2})
    assert results_of(first.executor, second)[0]["result"] == {"k": 2}
    assert first.executor.poll(first.handle) is ReplicaState.RUNNING
    victim = ProcessId.of(first.pid())
    first.executor.cancel(first.handle)
    assert results_of(first.executor, first.handles)[0]["status"] == "cancelled"
    assert not victim.alive()
    assert first.executor.poll(second[0]) is ReplicaState.SUCCEEDED


def test_any_process_can_use_a_handle(waiting, until, tmp_path):
    """Another process polls, reads logs, cancels and collects as well as the launcher."""
    run = waiting()
    until(lambda: run.executor.stream_logs(run.handle).strip() == "waiting", "the first line")
    program = """if True:
        import sys
        from diloco_local import LocalProcessExecutor
        from diloco_protocol import ReplicaHandle
        handle = ReplicaHandle.from_json(sys.stdin.read())
        executor = LocalProcessExecutor(root=sys.argv[1])
        print(executor.poll(handle), executor.stream_logs(handle).strip())
        executor.cancel(handle)
        print(executor.collect([handle])[0]["status"])
    """
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "state")],
        input=run.handle.to_json(),
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert done.stdout.splitlines() == ["running waiting", "cancelled"]
    assert run.executor.poll(run.handle) is ReplicaState.CANCELLED


def test_a_result_may_be_larger_than_the_buffer_of_a_pipe(make):
    """Collect does not hang on it."""
    executor = make()
    handles = executor.launch_replicas(1, "trainer:big", {"size": 15_000_000})
    (result,) = results_of(executor, handles)
    assert result["status"] == "succeeded"
    assert len(result["result"]) == 15_000_000


def test_a_result_that_is_not_json_is_a_failure(make):
    """It is not a success with result None."""
    executor = make()
    (result,) = results_of(executor, executor.launch_replicas(1, "trainer:unserialisable", {}))
    assert result["status"] == "failed"
    assert result["result"] is None
    assert "object" in result["error"]


def test_results_belong_to_their_handles(make):
    """Handles of several runs are collected together, in any order."""
    executor = make()
    a = executor.launch_replicas(2, "trainer:echo", {"run": "a"})
    b = executor.launch_replicas(2, "trainer:echo", {"run": "b"})
    order = [b[1], a[0], b[0], a[1], a[0]]
    results = results_of(executor, order)
    assert [r["result"]["run"] for r in results] == ["b", "a", "b", "a", "a"]
    assert [r["rank"] for r in results] == [1, 0, 0, 1, 0]


def test_a_terminal_replica_has_its_result(make, until):
    """No result is still on its way when the state is terminal."""
    executor = make()
    for k in range(3):
        handles = executor.launch_replicas(2, "trainer:echo", {"k": k})
        until(lambda handles=handles: all(executor.poll(handle).terminal for handle in handles))
        assert [r["result"] for r in executor.collect(handles, timeout=0)] == [{"k": k}] * 2


def test_collect_ends_nothing_when_its_time_is_up(waiting):
    """The replicas go on, and can be collected again."""
    run = waiting(2)
    results = run.executor.collect(run.handles, timeout=0.2)
    assert [(r["status"], r["exit_code"]) for r in results] == [("running", None)] * 2
    assert all(ProcessId.of(run.pid(rank)) for rank in (0, 1))
    run.go()
    assert [r["result"] for r in results_of(run.executor, run.handles)] == [0, 1]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("function", "kwargs", "exit_code", "name", "words"),
    [
        ("fail", {"message": "the cause"}, 1, None, "ValueError: the cause"),
        ("leave", {"code": 7}, 7, None, "7"),
        ("leave", {"code": "no data"}, 1, None, "no data"),
        ("interrupt", {}, 1, None, "KeyboardInterrupt"),
        ("hard_exit", {"code": 9}, 9, None, "9"),
        ("die", {"number": int(signal.SIGSEGV)}, 139, "SIGSEGV", "SIGSEGV"),
        ("die", {"number": int(signal.SIGKILL)}, 137, "SIGKILL", "SIGKILL"),
    ],
)
def test_every_kind_of_end_is_told_truly(make, function, kwargs, exit_code, name, words):
    """Exceptions, exits and signals have their exit code, name, words, and any traceback."""
    executor = make()
    handles = executor.launch_replicas(1, f"trainer:{function}", kwargs)
    (result,) = results_of(executor, handles)
    status = executor.describe(handles[0])
    assert (result["status"], result["exit_code"]) == ("failed", exit_code)
    assert (status.exit_code, status.signal) == (exit_code, name)
    assert words in result["error"]
    if function == "fail":
        assert "Traceback" in executor.stream_logs(handles[0])

"""Ending and finding runs: cancel, restarts, purge, handles in other places."""

import os
from dataclasses import replace
from importlib import metadata

import pytest

from diloco_local import LocalProcessExecutor
from diloco_protocol import (
    InvalidRequestError,
    Reason,
    ReplicaHandle,
    ReplicaNotFoundError,
    ReplicaState,
    get_executor,
)


def results(executor, handles, timeout=15):
    return executor.collect(handles, timeout=timeout)


def test_cancel_is_idempotent_and_has_the_scope_of_a_replica(waiting):
    run = waiting(2)
    for _ in range(3):
        run.executor.cancel(run.handle)
    assert results(run.executor, [run.handle])[0]["status"] == "cancelled"
    before = run.executor.describe(run.handle)
    run.executor.cancel(run.handle)
    assert run.executor.describe(run.handle) == before
    assert run.executor.poll(run.handles[1]) is ReplicaState.RUNNING
    run.go()
    assert results(run.executor, run.handles[1:])[0]["result"] == 1


@pytest.mark.parametrize(("function", "state"), [("echo", "succeeded"), ("fail", "failed")])
def test_a_cancel_changes_nothing_that_has_ended(make, function, state):
    executor = make()
    handles = executor.launch_replicas(1, f"trainer:{function}", {})
    first = results(executor, handles)
    executor.cancel(handles[0])
    assert results(executor, handles) == first
    assert first[0]["status"] == state


def test_a_success_that_wins_the_race_stays(waiting):
    run = waiting(function="polite")
    run.executor.cancel(run.handle)
    (result,) = results(run.executor, run.handles)
    assert (result["status"], result["exit_code"], result["result"]) == ("succeeded", 0, 0)


def test_a_failure_leaves_its_siblings_alone(waiting):
    run = waiting(2)
    os.kill(run.pid(0), 9)
    assert results(run.executor, [run.handle])[0]["status"] == "failed"
    assert run.executor.poll(run.handles[1]) is ReplicaState.RUNNING


def test_restarts_are_counted_and_bounded(make):
    executor = make()
    handles = executor.launch_replicas(1, "trainer:until_attempt", {"number": 3}, max_restarts=2)
    (result,) = results(executor, handles)
    assert (result["status"], result["result"], result["attempt"]) == ("succeeded", 3, 3)
    assert list(executor.log_iter(handles[0], streams="stdout")) == [
        "attempt 1",
        "attempt 2",
        "attempt 3",
    ]
    handles = executor.launch_replicas(1, "trainer:until_attempt", {"number": 3}, max_restarts=1)
    (result,) = results(executor, handles)
    assert (result["status"], result["attempt"]) == ("failed", 2)
    assert "attempt 2 fails" in result["error"]


def test_a_timeout_is_per_attempt(waiting, folder):
    run = waiting(timeout=1.0, max_restarts=1)
    (result,) = results(run.executor, run.handles)
    assert (result["status"], result["reason"], result["attempt"]) == ("failed", Reason.TIMEOUT, 2)
    assert (folder / "up-0-2").exists()


def test_a_cancelled_replica_is_not_started_again(waiting, folder):
    run = waiting(max_restarts=5)
    run.executor.cancel(run.handle)
    (result,) = results(run.executor, run.handles)
    assert (result["status"], result["attempt"]) == ("cancelled", 1)
    assert not (folder / "up-0-2").exists()


def test_purge_removes_what_has_ended_and_only_that(waiting, make, tmp_path):
    run = waiting(2, run_id="gone")
    run.executor.cancel(run.handle)
    results(run.executor, [run.handle])
    with pytest.raises(InvalidRequestError, match=r"replica\(s\) 1 have not ended"):
        run.executor.purge(run.handle)
    run.go()
    results(run.executor, run.handles)
    run.executor.purge(run.handle)
    run.executor.purge(run.handle)
    run.executor.cancel(run.handle)
    with pytest.raises(ReplicaNotFoundError):
        run.executor.poll(run.handle)
    assert results(run.executor, run.handles)[0]["reason"] == Reason.LOST
    assert run.executor.list_runs() == []
    # A new run of that name is another run: the old handle does not speak for it.
    (new,) = run.executor.launch_replicas(1, "trainer:echo", {}, run_id="gone")
    results(run.executor, [new])
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
    results(executor, [handle])
    for other, words in (
        (elsewhere(handle, host="somewhere-else"), "somewhere-else"),
        (elsewhere(handle, root=str(tmp_path / "unmounted")), "missing on this host"),
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

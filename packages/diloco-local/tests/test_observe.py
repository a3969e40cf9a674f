"""What is true of a replica right now, from its files and the process table."""

import json
import os
import signal

import pytest
from local_lab import PATIENCE, locate, results_of

from diloco_local._files import open_lock, try_lock
from diloco_local._identity import ProcessId
from diloco_local._observe import observe_replica
from diloco_protocol import ReplicaState

pytestmark = pytest.mark.processes


def test_a_replica_that_is_not_started_yet_is_pending(make, tmp_path):
    """It is not called running."""
    executor = make()
    (handle,) = executor.launch_replicas(1, "trainer:echo", {})
    results_of(executor, [handle])
    run, record = locate(handle)
    files = run.replica(0)
    files.final.unlink()
    files.state.unlink()
    lock = open_lock(run.lock)
    try:
        assert try_lock(lock, wait=PATIENCE)  # as a supervisor does that has started nothing yet
        assert observe_replica(run, record, 0).state is ReplicaState.PENDING
    finally:
        os.close(lock)


def test_a_reused_pid_is_not_the_replica(waiting, until):
    """A process is known by more than its pid, since pids are used again."""
    run = waiting()
    files, _ = locate(run.handle)
    state = json.loads(files.replica(0).state.read_text())
    watchers = json.loads((files.path / "supervisor.json").read_text())
    processes = [ProcessId.from_dict(watchers[key]) for key in ("supervisor", "parent")]
    processes.append(ProcessId.from_dict(state["runner"]))
    for process in processes:
        process.send(signal.SIGKILL)
    os.kill(run.pid(), signal.SIGKILL)
    until(
        lambda: not any(process.alive() for process in processes)
        and ProcessId.of(run.pid()) is None
    )
    # Somebody else now has the pid: this very process.
    state["runner"]["pid"] = os.getpid()
    files.replica(0).state.write_text(json.dumps(state))
    assert run.executor.poll(run.handle) is ReplicaState.FAILED
    run.executor.cancel(run.handle)  # and is not signalled


def test_a_damaged_end_does_not_count_and_is_said(make):
    executor = make()
    (handle,) = executor.launch_replicas(1, "trainer:echo", {})
    results_of(executor, [handle])
    run, _ = locate(handle)
    final = run.replica(0).final
    final.write_text("{ damaged")
    status = executor.describe(handle)
    assert status.state is ReplicaState.SUCCEEDED  # as its outcome says
    assert f"{final} is not JSON" in status.message

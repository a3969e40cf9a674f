"""What is true of a replica right now, from its files and the process table."""

import errno
import json
import os
import signal

import pytest
from local_lab import PATIENCE, ended_run, locate, results_of, run_of, verbs_on

from diloco_local import LocalProcessExecutor, _files, _logs, _processes
from diloco_local._files import open_lock, try_lock
from diloco_local._observe import observe_replica
from diloco_local._processes import ProcessId
from diloco_protocol import BackendError, ReplicaState

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
    processes = [ProcessId.of(watchers[key]) for key in ("supervisor", "parent")]
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


def lacking(*_, **__):
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def only_for(name, function):
    return lambda path, *rest, **more: (lacking if path.name == name else function)(
        path, *rest, **more
    )


@pytest.mark.parametrize(
    ("module", "name", "file"),
    [
        (_processes, "processes", None),
        (_processes, "marker_of", None),
        (_files, "open_own", "lock"),
        (_files, "open_own_stream", "state.json"),
        (_files, "open_own_stream", "outcome.json"),
    ],
)
def test_who_lacks_file_descriptors_does_not_call_a_replica_failed(
    tmp_path, monkeypatch, module, name, file
):
    handle = ended_run(tmp_path)
    run_of(handle).replica(0).final.unlink()  # so that the processes and the outcome tell
    executor = LocalProcessExecutor(root=tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(module, name, only_for(file, getattr(module, name)) if file else lacking)
        with pytest.raises(BackendError, match="Too many open files") as caught:
            executor.describe(handle)
        assert caught.value.retryable
    assert executor.describe(handle).state is ReplicaState.SUCCEEDED


def test_without_file_descriptors_every_verb_can_be_tried_again(tmp_path, monkeypatch):
    handle = ended_run(tmp_path)
    executor = LocalProcessExecutor(root=tmp_path, cwd="/")
    verbs = {
        **verbs_on(executor, handle),
        "list_runs": executor.list_runs,
        "attach": lambda: executor.attach("ended"),
        "launch": lambda: executor.launch_replicas(1, "json:loads", {}),
    }
    del verbs["collect"]  # which tries again by itself
    monkeypatch.setattr(os, "open", lacking)
    monkeypatch.setattr(os, "scandir", lacking)
    monkeypatch.setattr(os, "listdir", lacking)
    for name, verb in verbs.items():
        with pytest.raises(BackendError) as caught:
            verb()
        assert caught.value.retryable, name


@pytest.mark.parametrize("folder", ["folder", "line"])
def test_a_log_that_cannot_be_opened_for_the_moment_is_not_empty(tmp_path, monkeypatch, folder):
    handle = ended_run(tmp_path)
    executor = LocalProcessExecutor(root=tmp_path)
    lines = executor.log_iter(handle)
    monkeypatch.setattr(
        *((os, "scandir") if folder == "folder" else (_logs, "open_own_stream")), lacking
    )
    for read in (lambda: list(lines), lambda: executor.stream_logs(handle)):
        with pytest.raises(BackendError, match="Too many open files") as caught:
            read()
        assert caught.value.retryable

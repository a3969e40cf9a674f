"""Launches that are refused, or fail half-way: nothing is left of them."""

import errno
import fcntl
import os
import resource
import sys
from dataclasses import replace

import pytest
from local_lab import locate, results_of

from diloco_local import LocalProcessExecutor, _check, _runs
from diloco_protocol import (
    BackendError,
    InvalidRequestError,
    LaunchError,
    ReplicaNotFoundError,
    ReplicaState,
)

pytestmark = pytest.mark.processes


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"spot": True}, "interruptible"),
        ({"secrets": {"TOKEN": "store/x"}}, "secret store"),
        ({"cpu": "4"}, "confined to CPUs"),
        ({"memory": "16Gi"}, "memory"),
        ({"gpu": "many"}, "GPU"),
        ({"n": 0}, "n_replicas"),
        ({"run_id": "../up"}, "run_id"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": 1e18}, "timeout=1e.18 is longer"),
        ({"labels": {"a": "x" * (1 << 23)}}, "labels have 8388617 characters"),
        ({"entrypoint": "trainer:nothing"}, "no attribute 'nothing'"),
        ({"entrypoint": "no_such_module:f"}, "no_such_module"),
        ({"args": {"x": float("nan")}}, "nan"),
        ({"env": {"REPLICA_RANK": "3"}}, "REPLICA_RANK"),
    ],
)
def test_bad_input_is_named_before_anything_starts(
    make, tmp_path, nothing_survives, options, words
):
    executor = make(gpus=[])
    n = options.pop("n", 1)
    entrypoint = options.pop("entrypoint", "trainer:echo")
    args = options.pop("args", {})
    with pytest.raises(InvalidRequestError, match=words):
        executor.launch_replicas(n, entrypoint, args, **options)
    assert nothing_survives() == []
    assert executor.list_runs() == []
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"grace": -1}, "grace"),
        ({"grace": float("inf")}, "grace"),
        ({"pythonpath": "/a"}, "pythonpath must be a list"),
        ({"inherit_env": "PATH"}, "inherit_env must be a list"),
        ({"gpus": "0,1"}, "gpus must be a list"),
        ({"gpus": ["0", "0"]}, "names a GPU twice"),
    ],
)
def test_bad_options_are_named(options, words):
    with pytest.raises(InvalidRequestError, match=words):
        LocalProcessExecutor(**options)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"python": "/no/python"}, "/no/python"), ({"cwd": "/no/folder"}, "/no/folder")],
)
def test_bad_places_are_named_at_the_launch(make, options, words):
    with pytest.raises(InvalidRequestError, match=words):
        make(**options).launch_replicas(1, "trainer:echo", {})


def test_a_launcher_that_died_in_between_does_not_block_the_name(make, tmp_path):
    """Published and never started: no handle was ever given, so the name is free."""
    from diloco_local._files import write_json
    from diloco_local._rundir import Root

    executor = make()
    root = Root(tmp_path / "state")
    (handle,) = executor.launch_replicas(1, "trainer:echo", {}, run_id="good")
    _, record = locate(handle)
    staged = root.stage()
    write_json(staged.record, replace(record, run_id="dead", uid="x").to_dict())
    staged.lock.touch()
    assert root.publish(staged, "dead")
    assert executor.list_runs() == ["good"]
    with pytest.raises(ReplicaNotFoundError, match="'dead'"):
        executor.attach("dead")
    handles = executor.launch_replicas(1, "trainer:echo", {"k": 1}, run_id="dead")
    assert results_of(executor, handles)[0]["result"] == {"k": 1}
    assert executor.list_runs() == ["good", "dead"]


def test_an_interrupted_launch_leaves_nothing(make, folder, nothing_survives, monkeypatch, until):
    from diloco_local import _launch

    executor = make()

    def interrupted(descriptor, patience):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(_launch, "_read_line", interrupted)
        with pytest.raises(KeyboardInterrupt) as cut:
            executor.launch_replicas(2, "trainer:wait", {"folder": str(folder)}, run_id="cut")
    assert cut.value.__notes__ == ["run 'cut' was being started: what ran of it has been ended"]
    until(lambda: nothing_survives() == [])
    for handle in executor.attach("cut") if executor.list_runs() else []:
        assert executor.poll(handle) is ReplicaState.CANCELLED


def test_a_launcher_may_have_more_files_open_than_select_takes():
    from diloco_local import _launch

    reader, writer = os.pipe()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], 2048), before[1]))
    try:
        high = fcntl.fcntl(reader, fcntl.F_DUPFD_CLOEXEC, 1024)
        with pytest.raises(_launch.SupervisorError, match=r"within 0\.01 s"):
            _launch._read_line(high, 0.01)
        os.write(writer, b"{}\n")
        assert _launch._read_line(high, 10.0) == b"{}\n"
        os.close(writer)
        assert _launch._read_line(high, 10.0) == b""
        os.close(high)
    finally:
        os.close(reader)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_launch_that_was_interrupted_when_all_had_begun_can_be_repeated(
    make, folder, nothing_survives, monkeypatch
):
    """What it had started was ended, so the same launch again starts them anew."""
    from diloco_local import _launch

    executor, answered = make(), _launch._read_line

    def interrupted(*arguments):
        answered(*arguments)
        raise KeyboardInterrupt

    ask = (2, "trainer:wait", {"folder": str(folder)})
    with monkeypatch.context() as patch:
        patch.setattr(_launch, "_read_line", interrupted)
        with pytest.raises(KeyboardInterrupt):
            executor.launch_replicas(*ask, run_id="cut")
    assert nothing_survives() == []
    assert not executor.exists("cut")
    (folder / "go").touch()
    results = results_of(executor, executor.launch_replicas(*ask, run_id="cut"))
    assert [entry["status"] for entry in results] == ["succeeded", "succeeded"]


def test_a_root_that_cannot_be_written_is_named(make, tmp_path):
    (tmp_path / "file").write_text("no folder")
    executor = LocalProcessExecutor(root=tmp_path / "file" / "state", pythonpath=[tmp_path])
    make()  # for the trainer module
    with pytest.raises(InvalidRequestError, match="cannot be written below root"):
        executor.launch_replicas(1, "trainer:echo", {})


def test_a_disk_that_is_full_is_named(make, monkeypatch, nothing_survives):
    executor = make()

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(_runs, "write_json", full)
        with pytest.raises(InvalidRequestError, match=r"cannot be written below root.*No space"):
            executor.launch_replicas(1, "trainer:echo", {})
    assert executor.list_runs() == []
    assert list((executor._root.path / "staging").iterdir()) == []


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("place", "name"),
    [(_check.subprocess, "Popen"), (_runs, "open_lock"), (LocalProcessExecutor, "_supervise")],
)
def test_a_launch_without_file_descriptors_can_be_repeated(
    make, monkeypatch, nothing_survives, place, name
):
    executor = make()

    def lacking(*_, **__):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(place, name, lacking)
        with pytest.raises(BackendError, match="Too many open files") as caught:
            executor.launch_replicas(1, "trainer:echo", {}, run_id="again")
    assert caught.value.retryable
    assert executor.list_runs() == []
    results = results_of(executor, executor.launch_replicas(1, "trainer:echo", {}, run_id="again"))
    assert results[0]["status"] == "succeeded"


def test_a_current_folder_that_was_removed_is_said(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    for verb in (LocalProcessExecutor.plan, LocalProcessExecutor.launch_replicas):
        with pytest.raises(BackendError, match=r"system refused it: .*No such file"):
            verb(LocalProcessExecutor(root=tmp_path), 1, "json:loads")
    with pytest.raises(BackendError, match=r"system refused it: .*No such file"):
        LocalProcessExecutor(root="runs")
    assert LocalProcessExecutor(root=tmp_path, cwd=tmp_path).plan(1, "json:loads").requests


def test_a_launch_is_all_or_nothing(make, folder, tmp_path, nothing_survives, monkeypatch):
    """When one replica cannot be started, those before it are ended."""
    with pytest.raises(InvalidRequestError, match="lambda"):
        make().launch_replicas(2, lambda: None, {})
    executor = make()
    orders = LocalProcessExecutor._orders

    def spoil(self, request, setting):
        first, second, third = orders(self, request, setting)
        return [first, second, replace(third, argv=("/no/such/interpreter", *third.argv[1:]))]

    with monkeypatch.context() as patch:
        patch.setattr(LocalProcessExecutor, "_orders", spoil)
        with pytest.raises(LaunchError, match="/no/such/interpreter") as caught:
            executor.launch_replicas(3, "trainer:wait", {"folder": str(folder)}, run_id="half")
    assert caught.value.survivors == ()
    assert (
        nothing_survives() == []
    )  # at once: the launch returns when those that were started are gone
    assert executor.list_runs() == []
    # And the name is free again.
    (folder / "go").touch()
    handles = executor.launch_replicas(3, "trainer:wait", {"folder": str(folder)}, run_id="half")
    assert [r["result"] for r in results_of(executor, handles)] == [0, 1, 2]

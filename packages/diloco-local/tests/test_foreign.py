"""Handles of other roots, folders that others fill, and links: no verb touches anything there."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from local_lab import PATIENCE, ended_run, run_of, verbs_on, wait_until
from test_own import FOREIGN_FOLDERS, linked_folder
from test_supervisor import Watch

from diloco_local import LocalProcessExecutor
from diloco_local._processes import ProcessId
from diloco_local._record import AttemptState
from diloco_local._rundir import Root
from diloco_protocol import (
    BackendError,
    FolderJournal,
    InvalidRequestError,
    ReplicaNotFoundError,
    ReplicaState,
    ReplicaStatus,
    RunConflictError,
)
from diloco_protocol.backend import status_to_data

SECRET = "what another program wrote"


def contents(folder):
    """Everything below a folder, to see whether it changed."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def refused_by_all(executor, handle, *words):
    for name, call in verbs_on(executor, handle).items():
        with pytest.raises(InvalidRequestError) as caught:
            call()
        for word in words:
            assert str(word) in str(caught.value), name


def test_a_handle_of_another_root_is_refused_by_every_verb(tmp_path):
    handle = ended_run(tmp_path / "theirs")
    before = contents(tmp_path / "theirs")
    executor = LocalProcessExecutor(root=tmp_path / "mine")
    refused_by_all(executor, handle, tmp_path / "theirs", tmp_path / "mine", "use one with that")
    assert contents(tmp_path / "theirs") == before
    assert not (tmp_path / "mine").exists()


def test_a_root_that_no_path_can_be_is_not_looked_for(tmp_path, monkeypatch):
    """That would take hours."""
    handle = ended_run(tmp_path / "mine")
    forged = replace(handle, metadata={**handle.metadata, "root": str(tmp_path) + "/." * 100_000})
    asked = []
    plain = os.path.realpath
    monkeypatch.setattr(os.path, "realpath", lambda path: asked.append(path) or plain(path))
    refused_by_all(LocalProcessExecutor(root=tmp_path / "mine"), forged, "is below the root")
    assert not any(len(str(path)) > 4096 for path in asked)


@pytest.mark.processes
def test_a_forged_handle_ends_no_process(tmp_path):
    """Its author can also name a root, whose replica names any process to be ended."""
    handle = ended_run(tmp_path / "theirs")
    replica = run_of(handle).replica(0)
    replica.final.unlink()
    replica.attempt(1).outcome.unlink()
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as victim:
        named = ProcessId.of(victim.pid)
        state = AttemptState(attempt=1, phase="running", runner=named, started_at=1.0)
        replica.state.write_text(json.dumps(asdict(state)))
        executor = LocalProcessExecutor(root=tmp_path / "mine")
        with pytest.raises(InvalidRequestError, match="use one with that root"):
            executor.cancel(handle)
        assert not run_of(handle).path.joinpath("supervisor.json").exists()  # nobody was started
        assert named.alive()
        victim.communicate(b"\n")
    assert victim.returncode == 0


def test_a_purge_writes_down_the_ends_of_all_ranks(tmp_path):
    handle = ended_run(tmp_path / "theirs", result=3, ranks=2)
    handles = [handle, replace(handle, rank=1)]
    journal = FolderJournal(tmp_path / "journal")
    executor = LocalProcessExecutor(root=tmp_path / "theirs", journal=journal)
    executor.purge(handle)
    assert [entry["result"] for entry in executor.collect(handles, timeout=0)] == [3, 3]


@pytest.mark.parametrize("seen", [False, True])
def test_a_purge_writes_down_the_ends_for_handles_that_name_the_root_by_a_link(tmp_path, seen):
    handle = ended_run(tmp_path / "real", result=3)
    (tmp_path / "name").symlink_to(tmp_path / "real")
    journal = FolderJournal(tmp_path / "journal")
    executor = LocalProcessExecutor(root=tmp_path / "name", journal=journal)
    journal.record_launch(executor.attach("ended"))
    other = LocalProcessExecutor(root=tmp_path / "real", journal=journal)
    if seen:
        other.collect([handle])
    other.purge(handle)
    assert executor.collect(executor.attach("ended"))[0]["result"] == 3


def test_a_run_whose_record_is_a_link_hides_no_other(tmp_path):
    bad, good = (ended_run(tmp_path / "state", run_id=run_id) for run_id in ("bad", "good"))
    record = run_of(bad).record
    record.rename(tmp_path / "elsewhere")
    record.symlink_to(tmp_path / "elsewhere")
    seen = []
    with pytest.raises(BackendError, match="is a link"):
        LocalProcessExecutor(root=tmp_path / "state").collect([bad, good], progress=seen.append)
    assert list(seen[-1]) == [good]


def test_a_journal_tells_namesakes_in_two_roots_apart(tmp_path):
    journal = FolderJournal(tmp_path / "journal")
    one, two = (ended_run(tmp_path / root, uid=root) for root in ("one", "two"))
    for handle in (one, two):
        journal.record_launch([handle])
        executor = LocalProcessExecutor(root=handle.metadata["root"], journal=journal)
        executor.purge(handle)
    for handle in (one, two):
        executor = LocalProcessExecutor(root=handle.metadata["root"], journal=journal)
        assert executor.attach("ended") == [handle]


def test_a_root_may_be_named_by_a_link(tmp_path):
    handle = ended_run(tmp_path / "real", result=3)
    (tmp_path / "name").symlink_to(tmp_path / "real")
    executor = LocalProcessExecutor(root=tmp_path / "name")
    assert executor.collect([handle])[0]["result"] == 3
    assert executor.collect(executor.attach(handle.run_id))[0]["result"] == 3


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../elsewhere", "/", "a/b", "x\0", "Run", "x" * 300]
)
def test_only_names_that_a_launch_gives_are_looked_for(tmp_path, name):
    handle = ended_run(tmp_path / "state")
    ended_run(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "runs" / "ended").rename(tmp_path / "state" / "elsewhere")
    executor = LocalProcessExecutor(root=tmp_path / "state")
    before = contents(tmp_path)
    refused_by_all(executor, replace(handle, run_id=name), "no launch gives a run such a name")
    with pytest.raises((ReplicaNotFoundError, InvalidRequestError)):
        executor.attach(name)
    assert contents(tmp_path) == before


@pytest.mark.sampled
@pytest.mark.parametrize("kind", FOREIGN_FOLDERS)
@pytest.mark.parametrize("name", ["runs", "staging", "trash"])
def test_a_root_with_a_folder_that_others_can_fill_is_refused(tmp_path, name, kind):
    handle = ended_run(tmp_path / "state")
    Root(tmp_path / "state").discard(Root(tmp_path / "state").stage())  # so that trash is there
    folder = tmp_path / "state" / name
    folder.rename(tmp_path / "kept")
    make, words = FOREIGN_FOLDERS[kind]
    make(folder)
    if folder.is_dir():
        shutil.copytree(tmp_path / "kept", folder, dirs_exist_ok=True, copy_function=shutil.copy)
        FOREIGN_MODES.get(kind, lambda path: None)(folder)
    before = contents(tmp_path)
    executor = LocalProcessExecutor(root=tmp_path / "state")
    refused_by_all(executor, handle, folder, words)
    for call in (
        executor.list_runs,
        lambda: executor.attach("ended"),
        lambda: executor.cancel_run("ended"),
        lambda: executor.launch_replicas(1, "a_module_nobody_has:main", {}, run_id="ended"),
        lambda: executor.launch_replicas(1, "a_module_nobody_has:main", {}),
    ):
        with pytest.raises(InvalidRequestError, match=words):
            call()
    assert contents(tmp_path) == before


def test_a_root_in_which_everybody_can_replace_things_is_refused(tmp_path):
    handle = ended_run(tmp_path / "state")
    (tmp_path / "state").chmod(0o777)
    executor = LocalProcessExecutor(root=tmp_path / "state")
    refused_by_all(executor, handle, tmp_path / "state", "chmod o-w")
    with pytest.raises(InvalidRequestError, match="chmod o-w"):
        executor.launch_replicas(1, "a_module_nobody_has:main", {})


def test_a_root_that_leads_nowhere_is_refused(tmp_path):
    (tmp_path / "state").symlink_to(tmp_path / "state")
    executor = LocalProcessExecutor(root=tmp_path / "state")
    for call in (
        executor.list_runs,
        lambda: executor.attach("a-run"),
        lambda: executor.launch_replicas(1, "a_module_nobody_has:main", {}),
    ):
        with pytest.raises(InvalidRequestError, match="is a link, or not a folder"):
            call()


# What copying the old contents into a folder has made of its mode.
FOREIGN_MODES = {
    "the group's": lambda path: path.chmod(0o770),
    "everybody's": lambda path: path.chmod(0o707),
    "sticky": lambda path: path.chmod(0o1777),
}


REPLICA = "replica-0-uid-of-ended"


@pytest.mark.parametrize("place", ["", REPLICA, f"{REPLICA}/attempt-1"])
def test_a_folder_of_a_run_that_is_a_link_is_not_followed(tmp_path, place):
    handle = ended_run(tmp_path / "state")
    path = run_of(handle).path / place
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    before = contents(tmp_path / "elsewhere")
    executor = LocalProcessExecutor(root=tmp_path / "state")
    for name, call in verbs_on(executor, handle).items():
        if name == "purge" and place:
            continue  # removes links, and not what they lead to
        if place.endswith("attempt-1") and name in {"poll", "describe", "cancel"}:
            call()  # they do not look into it
        elif place == REPLICA and name == "cancel":
            call()  # nothing of it runs
        elif place == REPLICA and name == "poll":
            assert call() is ReplicaState.FAILED
        elif place == REPLICA and name == "describe":
            assert "is a link" in call().message
        elif place and name == "collect":
            (entry,) = call()
            assert entry["result"] is None
            assert "is a link" in entry["error"]
        else:
            with pytest.raises(BackendError, match="is a link"):
                call()
    assert contents(tmp_path / "elsewhere") == before
    if place.endswith("attempt-1"):
        executor.purge(handle)
        assert contents(tmp_path / "elsewhere") == before


@pytest.mark.parametrize(
    ("file", "verbs"),
    [
        ("run.json", ["poll", "describe", "collect", "stream_logs", "log_iter", "cancel", "purge"]),
        (f"{REPLICA}/attempt-1/stdout.log", ["stream_logs", "log_iter"]),
        (f"{REPLICA}/attempt-1/times.jsonl", ["stream_logs", "log_iter"]),
        ("lock", ["purge"]),
    ],
)
def test_a_file_of_a_run_that_is_a_link_is_not_followed(tmp_path, file, verbs):
    handle = ended_run(tmp_path / "state")
    path = run_of(handle).path / file
    path.unlink(missing_ok=True)
    (tmp_path / "secret").write_text(SECRET)
    path.symlink_to(tmp_path / "secret")
    executor = LocalProcessExecutor(root=tmp_path / "state")
    calls = verbs_on(executor, handle)
    for name in verbs:
        with pytest.raises(BackendError, match="is a link") as caught:
            calls[name]()
        assert SECRET not in str(caught.value)
    assert (tmp_path / "secret").read_text() == SECRET


@pytest.mark.processes
def opened(path):
    path.chmod(0o777)


def changed(path):
    path.rename(path.with_name("elsewhere"))
    path.mkdir(mode=0o700)


def replaced(path):
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def replaced_by_a_file(path):
    path.rename(path.with_name("elsewhere"))
    path.touch()


@pytest.mark.sampled
@pytest.mark.processes
@pytest.mark.parametrize("spoil", [opened, changed, replaced, replaced_by_a_file])
@pytest.mark.parametrize("supervised", [True, False])
def test_a_replica_that_spoils_its_folder_can_be_cancelled(waiting, spoil, supervised):
    """Its siblings go on, and what others could have put there says nothing of any process."""
    run = waiting(2)
    replica = run_of(run.handle).replica(0)
    around = Watch(run.handle, wait_until)
    bystander = subprocess.Popen(["sleep", "600"])
    try:
        spoil(replica.path)
        if spoil is opened:
            known = ProcessId.of(bystander.pid)
            state = asdict(AttemptState(1, "running", known, (known,), 1.0, None))
            replica.state.write_text(json.dumps(state))
        if not supervised:
            around.kill(around.guardian, around.supervisor)
        assert not run.executor.poll(run.handle).terminal
        run.executor.cancel(run.handle)
        (entry,) = run.executor.collect([run.handle], timeout=PATIENCE)
        assert entry["status"] == "cancelled"
        assert run.executor.poll(run.handles[1]) is ReplicaState.RUNNING
        assert bystander.poll() is None
        run.executor.cancel(run.handles[1])
        assert run.executor.collect([run.handles[1]])[0]["status"] == "cancelled"
    finally:
        bystander.kill()
        bystander.wait()


@pytest.mark.processes
def test_a_cancel_that_is_written_down_is_not_refused(waiting, tmp_path):
    run = waiting()
    wake = run_of(run.handle).wake
    wake.unlink()
    wake.symlink_to(tmp_path / "elsewhere")
    run.executor.cancel(run.handle)
    assert run.executor.collect([run.handle])[0]["status"] == "cancelled"


def test_a_file_in_place_of_a_run_is_not_taken_for_a_launch(tmp_path):
    linked = Root(tmp_path / "state")
    linked.discard(linked.stage())
    (tmp_path / "state" / "runs" / "mine").touch()
    executor = LocalProcessExecutor(root=tmp_path / "state")
    with pytest.raises(RunConflictError, match="is there already, and is no run"):
        executor.launch_replicas(1, "json:dumps", {}, run_id="mine")
    assert not list((tmp_path / "state" / "staging").iterdir())


def test_an_end_that_is_a_link_is_not_followed_and_does_not_count(tmp_path):
    handle = ended_run(tmp_path / "state", result=3)
    final = run_of(handle).replica(0).final
    final.rename(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").write_text(final_of_a_failure())
    final.symlink_to(tmp_path / "elsewhere")
    status = LocalProcessExecutor(root=tmp_path / "state").describe(handle)
    assert status.state is ReplicaState.SUCCEEDED  # as its outcome says
    assert f"{final} is a link" in status.message


def final_of_a_failure():
    return json.dumps(status_to_data(ReplicaStatus(ReplicaState.FAILED, message=SECRET)))


def test_a_purge_without_a_trash_folder_removes_the_run(tmp_path):
    handle = ended_run(tmp_path / "state")
    shutil.rmtree(tmp_path / "state" / "trash")
    executor = LocalProcessExecutor(root=tmp_path / "state")
    executor.purge(handle)
    assert not run_of(handle).path.exists()
    assert executor.list_runs() == []


def test_a_purge_that_removes_nothing_says_so(tmp_path, monkeypatch):
    handle = ended_run(tmp_path / "state")
    executor = LocalProcessExecutor(root=tmp_path / "state")

    def refuse(*_):
        raise PermissionError("not on a Monday")

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(BackendError, match=r"refused it.*not on a Monday"):
        executor.purge(handle)
    assert run_of(handle).path.exists()


def test_a_purge_that_meets_too_many_folders_in_folders_has_no_raw_error(tmp_path):
    handle = ended_run(tmp_path / "state")
    folders = [os.open(run_of(handle).replica(0).path, os.O_RDONLY)]
    for _ in range(sys.getrecursionlimit()):
        os.mkdir("a", dir_fd=folders[-1])
        folders.append(os.open("a", os.O_RDONLY, dir_fd=folders[-1]))
        os.close(folders.pop(0))
    os.close(folders.pop())
    executor = LocalProcessExecutor(root=tmp_path / "state")
    with contextlib.suppress(BackendError):  # newer Pythons remove them
        executor.purge(handle)
    assert executor.list_runs() == []
    subprocess.run(["rm", "-rf", tmp_path / "state"], check=True)  # which pytest could not


def test_a_purge_whose_trash_vanishes_at_that_moment_says_so(tmp_path, monkeypatch):
    handle = ended_run(tmp_path / "state")
    executor = LocalProcessExecutor(root=tmp_path / "state")
    rename = Path.rename

    def without_trash(path, target):
        shutil.rmtree(tmp_path / "state" / "trash")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", without_trash)
    with pytest.raises(BackendError, match="system refused it"):
        executor.purge(handle)
    assert run_of(handle).path.exists()


def test_a_link_in_place_of_a_run_is_not_taken_for_a_launch(tmp_path):
    linked = Root(tmp_path / "state")
    linked.discard(linked.stage())
    linked_folder(tmp_path / "state" / "runs" / "mine")
    executor = LocalProcessExecutor(root=tmp_path / "state")
    with pytest.raises(InvalidRequestError, match="is a link"):
        executor.launch_replicas(1, "a_module_nobody_has:main", {}, run_id="mine")
    assert executor.list_runs() == []


def test_of_a_root_that_is_missing_nothing_is_known(tmp_path):
    handle = ended_run(tmp_path / "mounted")
    (tmp_path / "mounted").rename(tmp_path / "elsewhere")
    refused_by_all(LocalProcessExecutor(root=tmp_path / "mounted"), handle, "missing on this host")

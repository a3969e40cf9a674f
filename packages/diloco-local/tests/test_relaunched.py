"""A reused name: what was meant for the purged run neither reads nor changes the new one."""

import json
import os
import shutil

import pytest
from local_lab import ended_run, locate, run_of

from diloco_local import LocalProcessExecutor, _runs
from diloco_local._files import DamagedFileError, open_lock, try_lock
from diloco_local._processes import ProcessId, members
from diloco_local._record import marker, read_record
from diloco_local._rundir import Root, RunDir
from diloco_protocol import BackendError, ReplicaNotFoundError, ReplicaState


@pytest.fixture
def relaunched(tmp_path, monkeypatch):
    """A handle whose run is relaunched after a verb has found it, and the new one's handle."""
    root = tmp_path / "state"
    old = ended_run(root)
    shutil.move(run_of(old).path, tmp_path / "old")
    new = ended_run(root, uid="another-uid")
    shutil.move(run_of(new).path, tmp_path / "new")
    shutil.move(tmp_path / "old", run_of(old).path)

    def swapped(*given, located=_runs.locate):
        found = located(*given)
        if (tmp_path / "new").exists():
            shutil.move(run_of(old).path, tmp_path / "old")
            shutil.move(tmp_path / "new", run_of(new).path)
        return found

    monkeypatch.setattr(_runs, "locate", swapped)
    return old, new


class Unwatched(LocalProcessExecutor):
    """Starts no supervisors."""

    _supervise = staticmethod(lambda *_, **__: None)


def test_a_look_says_nothing_of_the_new_run(relaunched, tmp_path):
    old, _ = relaunched
    with pytest.raises(ReplicaNotFoundError):
        Unwatched(root=tmp_path / "state").describe(old)


def test_a_cancel_ends_nothing_of_the_new_run(relaunched, tmp_path):
    old, new = relaunched
    later = RunDir(tmp_path / "new", "another-uid")
    later.replica(0).final.unlink()
    lock = open_lock(later.lock)
    assert try_lock(lock)  # as its supervisor does
    executor = Unwatched(root=tmp_path / "state")
    executor.cancel(old)
    assert locate(new)[0].replica(0).cancelled_at() is None
    executor.cancel(new)
    assert locate(new)[0].replica(0).cancelled_at() is not None
    os.close(lock)


def test_a_purge_removes_nothing_of_the_new_run(relaunched, tmp_path):
    old, new = relaunched
    executor = Unwatched(root=tmp_path / "state")
    executor.purge(old)
    assert executor.poll(new) is ReplicaState.SUCCEEDED


def test_logs_are_not_those_of_the_new_run(relaunched, tmp_path):
    old, _ = relaunched
    executor = Unwatched(root=tmp_path / "state")
    with pytest.raises(ReplicaNotFoundError):  # an empty log would say that it wrote nothing
        executor.stream_logs(old)


@pytest.mark.parametrize("follow", [False, True])
def test_who_reads_a_log_does_not_wait_for_the_new_run(relaunched, tmp_path, follow):
    old, _ = relaunched
    later = RunDir(tmp_path / "new", "another-uid")
    later.replica(0).final.unlink()
    lock = open_lock(later.lock)
    assert try_lock(lock)  # as its supervisor does
    with pytest.raises(ReplicaNotFoundError):
        list(Unwatched(root=tmp_path / "state").log_iter(old, follow=follow))
    os.close(lock)


def test_a_roll_back_ends_nothing_of_a_launch_that_came_after(tmp_path):
    root = Root(tmp_path / "state")
    old = read_record(run_of(ended_run(root.path)))
    shutil.rmtree(root.run(old.run_id).path)
    new = ended_run(root.path, uid="another-uid")
    assert _runs.roll_back(root, old) == []
    assert run_of(new).replica(0).cancelled_at() is None


@pytest.mark.parametrize("uid", ["", "..", "a/b", "A", "\0", "\ud800", "x" * 49])
def test_a_uid_that_is_no_name_leads_nowhere(tmp_path, uid):
    handle = ended_run(tmp_path)
    record = run_of(handle).record
    record.write_text(record.read_text().replace('"uid-of-ended"', json.dumps(uid)))
    with pytest.raises(DamagedFileError, match="uid must be a name"):
        Unwatched(root=tmp_path).attach("ended")


@pytest.mark.processes
def test_what_is_late_for_a_removed_run_does_not_report_into_the_new_one(waiting, make, until):
    """Its folder was removed by hand while it ran, and its name was launched again."""
    run = waiting(run_id="again")
    shutil.rmtree(run_of(run.handle).path)
    (new,) = run.executor.launch_replicas(1, "trainer:echo", {"new": 1}, run_id="again")
    (entry,) = run.executor.collect([new])
    run.go()
    until(lambda: ProcessId.of(run.pid()) is None, "the end of the old one")
    assert run.executor.collect([new]) == [entry]
    assert entry["result"] == {"new": 1}


@pytest.mark.processes
def test_a_cancel_does_not_pass_over_what_runs_without_its_folder(waiting, until):
    run = waiting()
    shutil.rmtree(run_of(run.handle).path)
    for verb in (run.executor.cancel, run.executor.purge):
        with pytest.raises(BackendError, match=f"still run: .*{run.pid()}"):
            verb(run.handle)
    run.go()
    until(lambda: not members(marker(run.handle.metadata["uid"], 0)), "its end")
    run.executor.cancel(run.handle)
    run.executor.purge(run.handle)


def test_an_interrupted_purge_can_be_repeated(tmp_path, monkeypatch):
    handle = ended_run(tmp_path)
    executor = Unwatched(root=tmp_path)

    def interrupted(_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", interrupted)
        with pytest.raises(KeyboardInterrupt):
            executor.purge(handle)
    assert list((tmp_path / "trash").iterdir())
    executor.purge(handle)
    assert list((tmp_path / "trash").iterdir()) == []

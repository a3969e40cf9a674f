"""The journal in a folder: what was written stays, also for other processes."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from diloco_protocol import (
    FolderJournal,
    Reason,
    ReplicaHandle,
    ReplicaState,
    ReplicaStatus,
    RunJournal,
    state_folder,
)
from diloco_protocol._errors import InvalidRequestError, SpecVersionError, UnavailableError

DONE = ReplicaStatus(
    ReplicaState.SUCCEEDED, attempt=2, reason=Reason.COMPLETED, exit_code=0, finished_at=3.5
)


def handles(run_id="a", count=3):
    return [
        ReplicaHandle(rank, "b", {"id": str(rank)}, run_id=run_id, world_size=count)
        for rank in range(count)
    ]


def test_it_is_a_journal(tmp_path):
    assert isinstance(FolderJournal(tmp_path), RunJournal)


def test_launches(tmp_path):
    journal = FolderJournal(tmp_path / "new")
    assert journal.runs() == []
    assert journal.handles("a") == []
    journal.record_launch(handles("a"))
    journal.record_launch(handles("b", 11))
    journal.record_launch(handles("a"))
    again = FolderJournal(tmp_path / "new")
    assert again.runs() == ["a", "b"]
    assert again.handles("b") == handles("b", 11)


def test_a_later_launch_of_the_same_name_takes_the_place_of_the_earlier_one(tmp_path):
    journal = FolderJournal(tmp_path)
    journal.record_launch(handles("a", 3))
    later = [replace(handle, metadata={"id": "new"}) for handle in handles("a", 2)]
    journal.record_launch(later)
    assert journal.handles("a") == later
    journal.record_launch(handles("a", 3))
    assert journal.handles("a") == handles("a", 3)


def test_parts_of_a_run_that_stand_on_several_clusters_are_all_kept(tmp_path):
    journal = FolderJournal(tmp_path)
    first, second, third = handles("a", 3)
    journal.record_launch([first, second])
    journal.record_launch([third])
    assert journal.handles("a") == [first, second, third]


def test_ends_with_results(tmp_path):
    first, second, _ = handles()
    journal = FolderJournal(tmp_path)
    assert journal.end(first) is None
    journal.record_end(first, DONE, {"loss": [1.5, None]})
    assert FolderJournal(tmp_path).end(first) == (DONE, {"loss": [1.5, None]})
    assert journal.end(second) is None


def test_the_first_end_stays(tmp_path):
    (handle, *_) = handles()
    journal = FolderJournal(tmp_path)
    journal.record_end(handle, DONE, 1)
    journal.record_end(handle, ReplicaStatus(ReplicaState.FAILED), None)
    assert journal.end(handle) == (DONE, 1)


def test_a_namesake_is_not_answered_for(tmp_path):
    journal = FolderJournal(tmp_path)
    journal.record_end(ReplicaHandle(0, "b", {"host": "one"}, run_id="a"), DONE, 1)
    other = ReplicaHandle(0, "b", {"host": "two"}, run_id="a")
    assert journal.end(other) is None
    journal.record_end(other, DONE, 2)
    assert journal.end(other) == (DONE, 2)


@pytest.mark.parametrize("run_id", ["", ".", "../up", "a/b", "%", "É 雪", "A", "a" * 40])
def test_no_name_leaves_the_folder_or_meets_another(tmp_path, run_id):
    journal = FolderJournal(tmp_path / "journal")
    journal.record_launch(handles("a"))
    (handle,) = [ReplicaHandle(0, "b/../..", run_id=run_id)]
    journal.record_launch([handle])
    journal.record_end(handle, DONE, 1)
    assert journal.runs() == sorted(["a", run_id])
    assert journal.handles(run_id) == [handle]
    assert journal.end(handle) == (DONE, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["journal"]
    assert not any(path.name.startswith(".") for path in tmp_path.rglob("*")), (
        "nothing half written is left"
    )


@pytest.mark.processes
def test_of_many_writers_the_first_wins(tmp_path):
    (handle, *_) = handles()
    gate = threading.Barrier(8)

    def write(number):
        gate.wait()
        FolderJournal(tmp_path).record_end(handle, DONE, number)
        return FolderJournal(tmp_path).end(handle)

    with ThreadPoolExecutor(8) as pool:
        assert len({end[1] for end in pool.map(write, range(8))}) == 1


def test_a_result_that_is_not_json_is_refused(tmp_path):
    with pytest.raises(InvalidRequestError, match=r"result is a builtins\.tuple"):
        FolderJournal(tmp_path).record_end(handles()[0], DONE, (1, 2))


def test_only_ends_are_recorded(tmp_path):
    with pytest.raises(ValueError, match="the state 'running' is not an end"):
        FolderJournal(tmp_path).record_end(handles()[0], ReplicaStatus(ReplicaState.RUNNING), None)


def test_another_version_is_refused(tmp_path):
    journal = FolderJournal(tmp_path)
    journal.record_end(handles()[0], DONE, 1)
    (file,) = tmp_path.rglob("*.ended.json")
    file.write_text('{"version": 5}')
    with pytest.raises(SpecVersionError, match="version 5"):
        journal.end(handles()[0])


def damaged(journal, change):
    (file,) = journal.folder.rglob("*.json")
    record = json.loads(file.read_text())
    change(record)
    file.write_text(json.dumps(record))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("state", "running", "the state 'running' is not an end"),
        ("state", "no", "a status has state='no'"),
        ("state", ["failed"], r"a status has state=\['failed'\]"),
        ("attempt", "1", "a status has attempt='1'"),
        ("attempt", True, "a status has attempt=True"),
        ("reason", "why", "a status has reason='why'"),
        ("exit_code", 1.5, "a status has exit_code=1.5"),
        ("message", None, "a status has message=None"),
        ("finished_at", "now", "a status has finished_at='now'"),
        ("stopping", 1, "a status has stopping=1"),
    ],
)
def test_a_damaged_end_is_named(tmp_path, field, value, message):
    journal = FolderJournal(tmp_path)
    journal.record_end(handles()[0], DONE, 1)
    damaged(journal, lambda record: record["status"].update({field: value}))
    with pytest.raises(InvalidRequestError, match=rf"ended\.json is damaged: .*{message}"):
        journal.end(handles()[0])


@pytest.mark.parametrize(
    "change",
    [
        lambda record: record.pop("status"),
        lambda record: record.update(more=1),
        lambda record: record.update(status=[]),
        lambda record: record["status"].pop("url"),
    ],
    ids=["no status", "a field more", "a status that is a list", "a status without url"],
)
def test_an_end_that_lacks_something_is_named(tmp_path, change):
    journal = FolderJournal(tmp_path)
    journal.record_end(handles()[0], DONE, 1)
    damaged(journal, change)
    with pytest.raises(InvalidRequestError, match=r"ended\.json is damaged"):
        journal.end(handles()[0])


@pytest.mark.parametrize("ranks", [3, ["0"], [[0]]])
def test_a_damaged_launch_is_named(tmp_path, ranks):
    journal = FolderJournal(tmp_path)
    journal.record_launch(handles(count=1))
    damaged(journal, lambda record: record.update(ranks=ranks))
    with pytest.raises(InvalidRequestError, match=r"launched\.json is damaged"):
        journal.handles("a")


@pytest.mark.parametrize("text", ["[]", "3", "null"])
def test_json_that_is_no_record_is_refused(tmp_path, text):
    journal = FolderJournal(tmp_path)
    journal.record_end(handles()[0], DONE, 1)
    (file,) = tmp_path.rglob("*.ended.json")
    file.write_text(text)
    with pytest.raises(SpecVersionError, match="version None"):
        journal.end(handles()[0])


def test_an_unwritable_folder_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UnavailableError, match="cannot be written"):
        FolderJournal(tmp_path / "file" / "journal").record_launch(handles())


def test_the_state_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert state_folder() == tmp_path / "diloco"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for ignored in ("", "state", "./state"):
        monkeypatch.setenv("XDG_STATE_HOME", ignored)
        assert state_folder().is_relative_to(tmp_path / "home")
    monkeypatch.delenv("XDG_STATE_HOME")
    assert state_folder().is_relative_to(tmp_path / "home")

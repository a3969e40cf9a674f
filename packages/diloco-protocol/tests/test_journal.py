"""The journal in a folder: what was written stays, also for other processes."""

import contextlib
import errno
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from json_lab import json_values, odd_values, statuses

from diloco_protocol import (
    FolderJournal,
    Reason,
    ReplicaHandle,
    ReplicaState,
    ReplicaStatus,
    RunJournal,
    state_folder,
)
from diloco_protocol import _journal_folder as journals
from diloco_protocol._errors import InvalidRequestError, SpecVersionError, UnavailableError
from diloco_protocol.backend import OUTCOME_BYTES, RECORD_BYTES

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


def test_launches_elsewhere_do_not_take_the_place_of_those_that_are_wanted(tmp_path):
    journal = FolderJournal(tmp_path)
    journal.record_launch(handles("a", 3))
    journal.record_launch([replace(handle, metadata={"id": "new"}) for handle in handles("a", 2)])
    assert journal.handles("a", lambda handle: handle.metadata["id"] != "new") == handles("a", 3)


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


@pytest.mark.parametrize("run_id", ["", ".", "../up", "a/b", "%", "É 雪", "A", "a" * 49])
def test_a_name_that_no_run_can_have_is_refused(tmp_path, run_id):
    journal = FolderJournal(tmp_path / "journal")
    journal.record_launch(handles("a"))
    handle = ReplicaHandle(0, "b", run_id=run_id)
    calls = [
        lambda: journal.record_launch([handle]),
        lambda: journal.record_end(handle, DONE, 1),
        lambda: journal.end(handle),
        lambda: journal.look(run_id),
    ]
    for call in calls:
        with pytest.raises(InvalidRequestError, match="a journal has no run of such a name"):
            call()
    assert journal.handles(run_id) == []
    assert journal.runs() == ["a"]


def test_no_name_leaves_the_folder_or_meets_another(tmp_path):
    journal = FolderJournal(tmp_path / "journal")
    names = ["b/../..", "b____..", "B/../..", "É 雪", "%"]
    odd = [ReplicaHandle(0, name, run_id="a" * 40) for name in names]
    journal.record_launch(odd)
    for number, handle in enumerate(odd):
        journal.record_end(handle, DONE, number)
    assert [journal.end(handle) for handle in odd] == [(DONE, number) for number in range(5)]
    assert sorted(map(str, journal.handles("a" * 40))) == sorted(map(str, odd))
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


def twice(record):
    record["handles"] *= 2


@pytest.mark.parametrize(
    "change",
    [
        lambda record: record.update(handles=3),
        lambda record: record.update(handles=[3]),
        lambda record: record.update(handles=[{"version": 9}]),
        lambda record: record["handles"][0].update(rank=10**4000),
        lambda record: record.update(more=1),
        twice,
    ],
    ids=range(6),
)
def test_a_damaged_launch_is_named_and_concerns_its_run_alone(tmp_path, change):
    journal = FolderJournal(tmp_path)
    journal.record_launch(handles(count=1))
    damaged(journal, change)
    journal.record_launch(handles("b"))
    with pytest.raises(InvalidRequestError, match=r"launched\.json is damaged"):
        journal.handles("a")
    assert journal.runs() == ["a", "b"]
    assert journal.handles("b") == handles("b")


def test_a_launch_is_one_small_file(tmp_path):
    """Of 2,000 ranks, too: each is named once."""
    journal = FolderJournal(tmp_path)
    many = [
        ReplicaHandle(
            rank, "sagemaker",
            {"job_name": f"run-{rank:05}", "region": "eu-west-1", "account": "123456789012"},
            run_id="a", world_size=2000,
        )
        for rank in range(2000)
    ]  # fmt: skip
    for _ in range(3):
        journal.record_launch(many)
    (file,) = tmp_path.rglob("*.json")
    assert file.stat().st_size < 500_000
    assert journal.handles("a") == many


def test_names_that_were_used_again_and_again(tmp_path):
    """Only what no later launch has taken a rank of is left, and each launch is kept once."""
    journal = FolderJournal(tmp_path)
    zero, one, two = handles("a", 3)
    launches = [[zero, one], [one, two], [two], [zero, one], [one, two], [two]]
    for number, launch in enumerate(launches):
        journal.record_launch(launch)
        assert len(list(tmp_path.rglob("*.json"))) == min(number + 1, 3)
    assert journal.handles("a") == [two]


@pytest.mark.parametrize("name", ["a%zz", "%110000%", "A", "%41", "%61%", "%%"])
def test_a_folder_that_no_run_has_made_is_passed_over(tmp_path, name):
    journal = FolderJournal(tmp_path)
    journal.record_launch(handles("a"))
    (tmp_path / name).mkdir()
    assert journal.runs() == ["a"]


def test_names_that_are_too_long_for_a_file_are_refused_by_name(tmp_path):
    journal = FolderJournal(tmp_path)
    assert journal.handles("x" * 5000) == []
    (handle,) = [ReplicaHandle(0, "b" * 5000, run_id="a")]
    journal.record_end(handle, DONE, 1)
    assert journal.end(handle) == (DONE, 1)
    handle = replace(handle, run_id="x" * 5000)
    for call in (lambda: journal.end(handle), lambda: journal.record_launch([handle])):
        with pytest.raises(InvalidRequestError, match="no run of such a name"):
            call()


@pytest.mark.parametrize(
    ("pattern", "most", "verb"),
    [
        ("*.launched.json", RECORD_BYTES, lambda journal: journal.handles("a")),
        ("*.ended.json", OUTCOME_BYTES, lambda journal: journal.end(handles()[0])),
    ],
    ids=["launch", "end"],
)
def test_a_record_is_not_read_beyond_what_any_can_be(tmp_path, pattern, most, verb):
    journal = FolderJournal(tmp_path)
    journal.record_launch(handles())
    journal.record_end(handles()[0], DONE, 1)
    (file,) = tmp_path.rglob(pattern)
    os.truncate(file, 10 * most)
    with pytest.raises(InvalidRequestError, match=f"larger than {most} bytes"):
        verb(journal)


@given(statuses.filter(lambda status: status.state.terminal), json_values)
def test_every_end_that_is_written_can_be_read(tmp_path_factory, status, result):
    journal = FolderJournal(tmp_path_factory.mktemp("journal"))
    journal.record_end(handles()[0], status, result)
    assert journal.end(handles()[0]) == (status, result)


changes = st.tuples(
    st.sampled_from(["handle", "status", "result", "version"]), st.text(max_size=3), odd_values
)


@given(changes)
def test_a_changed_record_is_refused_or_read(tmp_path_factory, change):
    place, name, value = change
    journal = FolderJournal(tmp_path_factory.mktemp("journal"))
    journal.record_end(handles()[0], DONE, 1)

    def put(record):
        inside = record[place]
        if name and isinstance(inside, dict):
            inside[sorted(inside)[len(name) % len(inside)]] = value
        else:
            record[place] = value

    damaged(journal, put)
    with contextlib.suppress(InvalidRequestError, SpecVersionError):
        journal.end(handles()[0])


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
    with pytest.raises(UnavailableError, match="Not a directory"):
        FolderJournal(tmp_path / "file" / "journal").record_launch(handles())


def test_the_state_folder(monkeypatch, tmp_path):
    usual = ".local/state/diloco"
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert state_folder() == tmp_path / "diloco"
    assert FolderJournal().folder == tmp_path / "diloco" / "journal"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for ignored in ("", "state", "./state"):
        monkeypatch.setenv("XDG_STATE_HOME", ignored)
        assert state_folder() == tmp_path / "home" / usual
    monkeypatch.delenv("XDG_STATE_HOME")
    assert state_folder() == tmp_path / "home" / usual


def test_a_launch_of_nothing_is_no_launch(tmp_path):
    FolderJournal(tmp_path / "new").record_launch([])
    assert not (tmp_path / "new").exists()


def test_what_is_known_to_be_the_latest_launch_is_not_written_again(tmp_path):
    journal = FolderJournal(tmp_path)
    journal.record_launch(handles("a"))
    (record,) = (tmp_path / "a").iterdir()
    number = record.stat().st_ino
    journal.record_launch(handles("a"))
    assert [path.stat().st_ino for path in (tmp_path / "a").iterdir()] == [number]


@pytest.mark.parametrize("begin", ["x", "", "\N{ARABIC-INDIC DIGIT THREE}", "9" * 200, "-1", "1e3"])
def test_a_launch_whose_file_has_another_name_is_the_oldest(tmp_path, begin):
    journal = FolderJournal(tmp_path)
    old = [replace(handle, metadata={"id": "old"}) for handle in handles("a")]
    journal.record_launch(old)
    (record,) = (tmp_path / "a").iterdir()
    record.rename(record.with_name(f"{begin}.0.launched.json"))
    assert journal.handles("a") == old
    journal.record_launch(handles("a"))
    assert journal.handles("a") == handles("a")


def test_the_record_of_another_replica_is_none_of_this_one(tmp_path):
    journal = FolderJournal(tmp_path)
    first, second, _ = handles("a")
    journal.record_end(first, DONE, 1)
    (record,) = (tmp_path / "a").iterdir()
    journal.record_end(second, DONE, 2)
    (other,) = set((tmp_path / "a").iterdir()) - {record}
    other.write_bytes(record.read_bytes())
    assert journal.end(second) is None
    assert journal.end(first) == (DONE, 1)


def test_what_could_not_be_read_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr("diloco_protocol._journal_records.OUTCOME_BYTES", 2000)
    monkeypatch.setattr("diloco_protocol._journal_records.RECORD_BYTES", 2000)
    journal = FolderJournal(tmp_path)
    for write in (
        lambda: journal.record_end(handles()[0], DONE, "x" * 2000),
        lambda: journal.record_launch(handles(count=100)),
    ):
        with pytest.raises(InvalidRequestError, match="is larger than 2000 bytes"):
            write()
    assert list(tmp_path.rglob("*.json*")) == []


def test_where_files_have_no_links_the_first_end_stays_too(tmp_path, monkeypatch):
    def refused(*_):
        raise PermissionError("this file system has no hard links")

    monkeypatch.setattr(os, "link", refused)
    journal = FolderJournal(tmp_path)
    handle = handles()[0]
    journal.record_end(handle, DONE, 1)
    journal.record_end(handle, replace(DONE, attempt=9), 2)
    assert journal.end(handle) == (DONE, 1)
    assert len(list((tmp_path / "a").iterdir())) == 1


def test_a_record_that_cannot_be_read_is_no_damage(tmp_path, monkeypatch):
    journal = FolderJournal(tmp_path)
    handle = handles()[0]
    journal.record_end(handle, DONE, 1)

    def refused(*_):
        raise OSError("input/output error")

    monkeypatch.setattr("diloco_protocol._journal_folder.open_private", refused)
    with pytest.raises(UnavailableError, match="cannot be read: input/output error"):
        journal.end(handle)


def test_without_a_home_the_folder_has_to_be_named(monkeypatch):
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    with pytest.raises(InvalidRequestError, match=r"STATE_HOME='~/.*': there is no such home"):
        FolderJournal()


@pytest.mark.parametrize("folder", ["a\0b", 5, b"a", "", "~nobody-of-that-name/x"])
def test_a_folder_that_can_be_none_is_refused(folder):
    with pytest.raises(InvalidRequestError, match="folder"):
        FolderJournal(folder)


def test_a_home_folder_is_known(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert FolderJournal("~/x").folder == tmp_path / "x"


@pytest.mark.parametrize("name", ["file", "x" * 300])
def test_a_folder_that_cannot_be_read_is_named(tmp_path, name):
    (tmp_path / "file").touch()
    journal = FolderJournal(tmp_path / name)
    handle = ReplicaHandle(0, "b", run_id="run")
    for verb in (journal.runs, lambda: journal.end(handle), lambda: journal.handles("run")):
        try:
            assert verb() in ([], None)
        except UnavailableError as error:
            assert "cannot be read" in str(error)  # noqa: PT017 - some systems say that nothing is there
    with pytest.raises(UnavailableError, match="cannot be read"):
        journal.runs()


@pytest.mark.parametrize("run_id", [5, None, b"run"])
def test_the_name_of_a_run_is_text(tmp_path, run_id):
    with pytest.raises(InvalidRequestError, match="no run of such a name"):
        FolderJournal(tmp_path / "journal").handles(run_id)


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left"), KeyboardInterrupt()])
def test_a_write_that_fails_leaves_no_file(tmp_path, monkeypatch, error):
    """Or a full disk would be filled by them, one at every look."""
    journal = FolderJournal(tmp_path)
    journal.record_launch(handles())
    before = sorted(tmp_path.rglob("*"))

    def write_half(descriptor, mode):
        os.write(descriptor, b"{")
        os.close(descriptor)
        raise error

    monkeypatch.setattr(os, "fdopen", write_half)
    with pytest.raises((UnavailableError, KeyboardInterrupt)):
        journal.record_end(handles()[0], DONE, 1)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_in_place_of_a_record_is_damage(tmp_path):
    """It concerns its rank, or its run, alone."""
    journal = FolderJournal(tmp_path)
    first, second = handles()[:2]
    journal.record_launch([first, second])
    for handle in (first, second):
        journal.record_end(handle, DONE, 1)
    (end,) = tmp_path.rglob(f"*-{first.rank:05}.*.ended.json")
    end.unlink()
    end.mkdir()
    before = len(list(Path("/dev/fd").iterdir()))
    with pytest.raises(journals.DamagedRecordError, match="not a file of the user"):
        journal.end(first)
    assert len(list(Path("/dev/fd").iterdir())) == before
    assert journal.end(second) == (DONE, 1)


def test_a_launch_that_is_repeated_replaces_its_damaged_record(tmp_path):
    journal = FolderJournal(tmp_path)
    journal.record_launch(handles())
    (launch,) = tmp_path.rglob("*.launched.json")
    launch.write_text("{")
    journal.record_launch(handles())
    assert journal.handles("a") == handles()

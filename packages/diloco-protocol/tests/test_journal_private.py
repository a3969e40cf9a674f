"""A journal is believed, so nobody else can write it, or read the results in it."""

import os
import stat

import pytest

from diloco_protocol import (
    FolderJournal,
    InvalidRequestError,
    Reason,
    ReplicaHandle,
    ReplicaState,
    ReplicaStatus,
    UnavailableError,
)

HANDLE = ReplicaHandle(0, "b", {"id": "0"}, run_id="a")
DONE = ReplicaStatus(ReplicaState.SUCCEEDED, reason=Reason.COMPLETED, exit_code=0)
OTHER = 12345
"""The id of a user who is not this one."""

only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture
def journal(tmp_path):
    made = FolderJournal(tmp_path / "above" / "journal")
    made.record_launch([HANDLE])
    made.record_end(HANDLE, DONE, 1)
    return made


VERBS = [
    lambda journal: journal.record_launch([HANDLE]),
    lambda journal: journal.record_end(HANDLE, DONE, 2),
    lambda journal: journal.handles("a"),
    lambda journal: journal.end(HANDLE),
]
every_verb = pytest.mark.parametrize(
    "verb", VERBS, ids=["record_launch", "record_end", "handles", "end"]
)


def mode(path):
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.mark.parametrize("umask", [0o000, 0o022])
def test_what_it_makes_is_this_users_alone(tmp_path, umask):
    before = os.umask(umask)
    try:
        journal = FolderJournal(tmp_path / "above" / "journal")
        journal.record_launch([HANDLE])
        journal.record_end(HANDLE, DONE, 1)
    finally:
        os.umask(before)
    everything = list(tmp_path.rglob("*"))  # and what is above it
    assert {mode(path) for path in everything if path.is_dir()} == {0o700}
    assert {mode(path) for path in everything if path.is_file()} == {0o600}
    assert len(everything) == 5


@every_verb
@pytest.mark.parametrize("below", [".", "a"], ids=["the journal", "a run"])
@pytest.mark.parametrize("right", [stat.S_IWGRP, stat.S_IWOTH], ids=["group", "everybody"])
def test_a_folder_that_others_can_write_to_is_refused(journal, verb, below, right):
    folder = journal.folder / below
    folder.chmod(0o700 | right)
    with pytest.raises(
        InvalidRequestError, match=rf"others can write to the folder {folder}.*chmod go-w"
    ):
        verb(journal)


@only_root
@every_verb
@pytest.mark.parametrize("below", [".", "a"], ids=["the journal", "a run"])
def test_another_users_folder_is_refused(journal, verb, below):
    folder = journal.folder / below
    os.chown(folder, OTHER, -1)
    with pytest.raises(
        InvalidRequestError,
        match=f"{folder} .it belongs to the user with the id {OTHER}",
    ):
        verb(journal)


def test_a_folder_is_refused_before_anything_is_started(tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(InvalidRequestError, match="others can write"):
        FolderJournal(tmp_path)


def test_runs_are_not_listed_from_a_folder_of_others(journal):
    journal.folder.chmod(0o777)
    with pytest.raises(InvalidRequestError, match="others can write"):
        journal.runs()


def test_a_folder_of_ones_own_may_be_a_link(journal, tmp_path):
    (tmp_path / "link").symlink_to(journal.folder)
    assert FolderJournal(tmp_path / "link").end(HANDLE) == (DONE, 1)


def test_a_record_that_is_a_link_is_not_followed(journal, tmp_path):
    (file,) = journal.folder.rglob("*.ended.json")
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InvalidRequestError, match=f"{file} is a link"):
        journal.end(HANDLE)


def test_a_record_that_is_no_file_is_refused(journal):
    """A FIFO would be waited for without end."""
    (file,) = journal.folder.rglob("*.ended.json")
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(InvalidRequestError, match=f"{file} is a link, or not a file"):
        journal.end(HANDLE)


@only_root
def test_another_users_record_is_refused(journal):
    (file,) = journal.folder.rglob("*.ended.json")
    os.chown(file, OTHER, -1)
    with pytest.raises(InvalidRequestError, match=f"{file} is a link, or not a file of the user"):
        journal.end(HANDLE)


def test_a_record_that_is_no_text_is_refused(journal):
    (file,) = journal.folder.rglob("*.ended.json")
    file.write_bytes(b"\xff")
    with pytest.raises(InvalidRequestError, match=r"ended\.json is damaged: .*codec"):
        journal.end(HANDLE)


def test_a_record_that_goes_while_it_is_read_is_no_damage(journal, monkeypatch):
    """Somebody else may take it away between two looks."""

    def gone(*_):
        raise FileNotFoundError("it is gone")

    monkeypatch.setattr(os, "open", gone)
    with pytest.raises(UnavailableError, match="cannot be read: it is gone"):
        journal.handles(HANDLE.run_id)

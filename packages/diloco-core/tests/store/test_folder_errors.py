"""What the system refuses in a folder has the name that a store's errors have.

The kernel refuses by itself, or is told to.
"""

import errno
import os

import pytest

from diloco_core import CorruptedObjectError, ObjectNotFoundError, StoreUnavailableError
from diloco_core._store._open import open_store


@pytest.fixture
def store(tmp_path):
    opened = open_store(str(tmp_path))
    yield opened
    opened.close()


def refuse(monkeypatch, name, number):
    """Let a system call fail; what a file system answers cannot be had from the one that the tests
    run on.
    """

    def act(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, name, act)


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.EXDEV, errno.ENOSPC])
def test_a_file_system_without_hard_links(store, tmp_path, monkeypatch, number):
    refuse(monkeypatch, "link", number)
    with pytest.raises(
        StoreUnavailableError, match=r"'.*/claims/0' cannot be created: .*hard link"
    ):
        store.create("claims/0", b"mine")
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == []


def test_an_object_that_cannot_be_deleted(store, tmp_path):
    (tmp_path / "claims" / "0").mkdir(parents=True)  # a folder cannot be unlinked, whoever tries
    with pytest.raises(
        StoreUnavailableError, match=r"'.*/claims/0' cannot be deleted: .*may read and write"
    ):
        store.delete(["claims/0"])


@pytest.mark.parametrize("name", ["stat", "replace"])
def test_a_file_that_cannot_be_kept(store, monkeypatch, name):
    store.put("deltas/0", [bytes(2**17)])
    with monkeypatch.context() as patch:
        refuse(patch, name, errno.EACCES)
        with pytest.raises(StoreUnavailableError, match="cannot be deleted: Permission denied"):
            store.delete(["deltas/0"], unread=True)
    assert store.get("deltas/0") == bytes(2**17)


def test_a_folder_that_cannot_be_listed(store, tmp_path):
    (tmp_path / "deltas").touch()  # a file where a folder should be
    with pytest.raises(
        StoreUnavailableError, match=r"'.*/deltas' cannot be listed: Not a directory"
    ):
        store.list("deltas/")


def test_a_file_that_cannot_be_read(store, monkeypatch):
    store.put("k", [b"value"])
    with store.open("k") as reader:
        refuse(monkeypatch, "preadv", errno.ESTALE)
        with pytest.raises(
            StoreUnavailableError, match=r"'.*/k' cannot be read: Stale file handle"
        ):
            reader.read_into(0, memoryview(bytearray(5)))


def test_a_folder_is_no_object(store, tmp_path):
    (tmp_path / "k").mkdir()
    for look in (store.get, lambda key: store.open(key).read_into(0, memoryview(bytearray(1)))):
        with pytest.raises(
            CorruptedObjectError,
            match=r"'.*/k' is a folder, and the objects of a run are regular files",
        ):
            look("k")
    with pytest.raises(ObjectNotFoundError):
        store.get("k2")


def test_what_has_a_name_that_begins_with_a_dot_is_no_object(store, tmp_path):
    store.put("deltas/0", [b"value"])
    (tmp_path / ".snapshot").mkdir()
    (tmp_path / ".snapshot" / "0").write_bytes(b"yesterday's")
    (tmp_path / "deltas" / ".nfs000000000001").write_bytes(b"deleted elsewhere, still open here")
    assert list(store.list("")) == list(store.list("deltas/")) == ["deltas/0"]

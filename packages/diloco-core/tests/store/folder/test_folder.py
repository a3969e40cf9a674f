"""Test what is particular to local folders; what every store promises is in ``test_laws.py``."""

import errno
import os
import subprocess
import sys

import pytest

from diloco_core import CorruptedObjectError, ObjectNotFoundError, StoreUnavailableError
from diloco_core._store._api import creates_once
from diloco_core._store._drivers._folder import FolderStore

LARGE = 2**16  # bytes from which on the file of a deleted object is kept

_WRITE_OFTEN = """
import sys
from diloco_core._store._open import open_store
store, value = open_store(sys.argv[1]), 0
print("writing", flush=True)
while True:
    value = (value + 1) % 256
    store.put("k", [bytes([value]) * 70_000, bytes([value]) * 70_000])
"""


def files(folder):
    return [path.name for path in folder.rglob("*") if path.is_file()]


@pytest.mark.processes
def test_a_reader_in_another_process_never_sees_a_torn_object(store, run):
    store.put("k", [bytes(140_000)])
    command = [sys.executable, "-c", _WRITE_OFTEN, str(run)]
    writer = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        seen = set()
        assert writer.stdout.readline() == b"writing\n"
        while len(seen) < 50 and writer.poll() is None:
            data = store.get("k")
            assert len(data) == 140_000
            assert len(set(data)) == 1
            seen.add(data[0])
    finally:
        writer.kill()
        writer.communicate()
    assert len(seen) == 50
    assert list(store.list("")) == ["k"]


def test_temporary_files_are_no_objects(store, run):
    def parts():
        yield b"begun"
        seen.append((store.list(""), len(files(run))))

    seen = []
    store.put("k", parts())
    assert seen == [({}, 1)]


class TestFilesOfUnreadObjects:
    def test_are_written_over(self, store, run):
        store.put("deltas/1/a", [b"x" * LARGE])
        inode = (run / "deltas/1/a").stat().st_ino
        store.delete(["deltas/1/a"], unread=True)
        assert store.list("") == {}
        assert store.put("deltas/2/a", [b"short"]) == 5
        assert (run / "deltas/2/a").stat().st_ino == inode
        assert store.get("deltas/2/a") == b"short", "the longer old content is cut off"
        store.put("deltas/2/a", [b"y" * LARGE])
        inode = (run / "deltas/2/a").stat().st_ino
        store.delete(["deltas/2/a"], unread=True)
        store.put("state/1", [b"another kind"])
        assert (run / "state/1").stat().st_ino != inode
        store.close()
        assert [path for path in run.iterdir() if path.is_file()] == []
        store.put("deltas/3/a", [b"goes on"])
        assert store.get("deltas/3/a") == b"goes on"

    def test_are_not_taken_for_records(self, store, run):
        store.put("state/1", [b"x" * LARGE])
        inode = (run / "state/1").stat().st_ino
        store.create("state/1.done", b"a record")
        store.delete(["state/1.done", "state/1"], unread=True)
        store.create("state/2.done", b"a record")
        assert store.create("state/2", iter([b"y" * LARGE]))
        assert (run / "state/2").stat().st_ino == inode

    def test_are_gone_after_a_failed_write(self, store, run):
        def parts():
            yield b"begun"
            raise RuntimeError("lost the thread")

        store.put("k/1", [b"x" * LARGE])
        store.delete(["k/1"], unread=True)
        with pytest.raises(RuntimeError, match="lost the thread"):
            store.put("k/2", parts())
        assert store.list("") == {}
        store.close()
        assert files(run) == []


class _Refuses(FolderStore):
    """It says that the key exists, and has written over it all the same."""

    def create(self, key, data):
        there = key in self.list(f"{key.rpartition('/')[0]}/")
        self.put(key, [data])
        return not there


def test_a_store_that_refuses_and_writes_all_the_same_is_found_out(tmp_path):
    assert creates_once(FolderStore(str(tmp_path)))
    assert not creates_once(_Refuses(str(tmp_path)))
    assert FolderStore(str(tmp_path)).list("") == {}


class TestWhatTheSystemRefuses:
    """It has the name that a store's errors have: the kernel refuses by itself, or is told to."""

    @staticmethod
    def refuse(monkeypatch, name, number):
        def act(*_, **__):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, name, act)

    @pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.EXDEV, errno.ENOSPC])
    def test_hard_links(self, store, run, monkeypatch, number):
        self.refuse(monkeypatch, "link", number)
        with pytest.raises(
            StoreUnavailableError, match=r"claims/0' cannot be created: .*hard link"
        ):
            store.create("claims/0", b"mine")
        assert files(run) == []

    def test_deleting(self, store, run):
        (run / "claims" / "0").mkdir(parents=True)  # cannot be unlinked, whoever tries
        with pytest.raises(StoreUnavailableError, match=r"0' cannot be deleted: .*read and write"):
            store.delete(["claims/0"])

    @pytest.mark.parametrize("name", ["stat", "replace"])
    def test_keeping_a_file(self, store, monkeypatch, name):
        store.put("deltas/0", [bytes(2**17)])
        with monkeypatch.context() as patch:
            self.refuse(patch, name, errno.EACCES)
            with pytest.raises(StoreUnavailableError, match="cannot be deleted: Permission denied"):
                store.delete(["deltas/0"], unread=True)
        assert store.get("deltas/0") == bytes(2**17)

    def test_listing(self, store, run):
        (run / "deltas").touch()  # a file where a folder should be
        with pytest.raises(StoreUnavailableError, match=r"deltas' cannot be listed: Not a dir"):
            store.list("deltas/")

    def test_reading(self, store, monkeypatch):
        store.put("k", [b"value"])
        with store.open("k") as reader:
            self.refuse(monkeypatch, "preadv", errno.ESTALE)
            with pytest.raises(StoreUnavailableError, match=r"k' cannot be read: Stale file"):
                reader.read_into(0, memoryview(bytearray(5)))


def test_a_folder_is_no_object(store, run):
    (run / "k").mkdir()
    for look in (store.get, lambda key: store.open(key).read_into(0, memoryview(bytearray(1)))):
        with pytest.raises(CorruptedObjectError, match=r"/k' is a folder, and .* regular files"):
            look("k")
    with pytest.raises(ObjectNotFoundError):
        store.get("k2")


@pytest.mark.parametrize("write", ["put", "create"])
def test_a_disk_that_is_full_in_the_middle_leaves_nothing(store, run, full_disk, write):
    store.put("k", [b"before"])
    with pytest.raises(StoreUnavailableError, match=r"File too large. Readers do not see any"):
        getattr(store, write)("k", [bytes(600_000)] * 3)
    assert store.get("k") == b"before"
    assert files(run) == ["k"]

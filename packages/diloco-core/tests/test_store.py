"""The five operations of every store, on the drivers that need no server."""

import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_core import (
    ConfigurationError,
    CorruptedObjectError,
    ObjectNotFoundError,
    StoreUnavailableError,
)
from diloco_core._store import open_store
from diloco_core._store_folder import FolderStore
from diloco_core._store_remote import RemoteStore
from diloco_protocol import MissingDependencyError


@pytest.fixture(params=["folder", "memory"])
def store(request, tmp_path):
    if request.param == "folder":
        return open_store(str(tmp_path / "run"))
    return open_store(f"memory://{tmp_path}/run")


def test_a_path_and_a_file_uri_are_the_same_folder(tmp_path):
    by_path, by_uri = open_store(str(tmp_path / "a b")), open_store((tmp_path / "a b").as_uri())
    by_path.put("x", [b"1"])
    assert isinstance(by_uri, FolderStore)
    assert by_uri.get("x") == b"1"


def test_other_schemes_go_through_fsspec():
    assert isinstance(open_store("memory://somewhere/run"), RemoteStore)


def test_put_then_get_and_list(store):
    assert store.put("a/b/1", [b"one", b"-", bytearray(b"two")]) == 7
    store.put("a/2", [b""])
    assert store.get("a/b/1") == b"one-two"
    assert store.list("a/") == {"a/2": 0, "a/b/1": 7}
    assert store.list("a/b/") == {"a/b/1": 7}
    assert store.list("nothing/") == {}


def test_put_replaces(store):
    store.put("k", [b"a longer one"])
    store.put("k", [b"short"])
    assert store.get("k") == b"short"


def test_a_part_may_be_reused_after_it_was_taken(store):
    def parts():
        buffer = bytearray(1)
        for number in range(5):
            buffer[0] = number
            yield memoryview(buffer)

    store.put("k", parts())
    assert store.get("k") == bytes(range(5))


def test_nothing_is_written_when_the_parts_fail(store):
    def parts():
        yield b"begun"
        raise RuntimeError("lost the thread")

    with pytest.raises(RuntimeError, match="lost the thread"):
        store.put("a/k", parts())
    assert store.list("a/") == {}
    with pytest.raises(ObjectNotFoundError, match="a/k"):
        store.get("a/k")


def test_create_is_once(store):
    assert store.create("c/k", b"first")
    assert not store.create("c/k", b"second")
    assert store.get("c/k") == b"first"


def test_one_of_many_racing_creates_wins(store):
    for number in range(20):
        start = threading.Barrier(8)
        won = []

        def racer(name, number=number, start=start, won=won):
            start.wait()
            if store.create(f"race/{number}", name.encode() * 1000):
                won.append(name)

        threads = [threading.Thread(target=racer, args=(str(i),)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1
        assert store.get(f"race/{number}") == won[0].encode() * 1000


def test_ranged_reads(store):
    store.put("k", [bytes(range(200))])
    with store.open("k") as reader:
        assert reader.size == 200
        buffer = bytearray(10)
        for offset in (0, 190, 55):
            reader.read_into(offset, memoryview(buffer))
            assert bytes(buffer) == bytes(range(offset, offset + 10))
        with pytest.raises(CorruptedObjectError, match="truncated"):
            reader.read_into(195, memoryview(buffer))


def test_what_is_absent_is_a_named_error(store):
    with pytest.raises(ObjectNotFoundError, match="no/such"):
        store.get("no/such")
    with pytest.raises(ObjectNotFoundError, match="no/such"):
        store.open("no/such")


def test_delete_passes_over_what_is_absent(store):
    store.put("d/1", [b"x"])
    store.put("d/2", [b"x"])
    store.delete(["d/1", "d/none"])
    assert list(store.list("d/")) == ["d/2"]
    store.delete(["d/2"])
    assert store.list("d/") == {}
    store.put("d/3", [b"y"])  # the folder may have gone with its last object
    assert store.get("d/3") == b"y"


@given(st.lists(st.binary(max_size=300), max_size=6))
def test_any_parts_come_back_joined(parts):
    store = open_store("memory://hypothesis/parts")
    assert store.put("k", parts) == sum(map(len, parts))
    assert store.get("k") == b"".join(parts)


_WRITE_OFTEN = """
import sys
from diloco_core._store import open_store
store, value = open_store(sys.argv[1]), 0
while True:
    value = (value + 1) % 256
    store.put("k", [bytes([value]) * 70_000, bytes([value]) * 70_000])
"""


def test_a_reader_in_another_process_never_sees_a_torn_object(tmp_path):
    store = open_store(str(tmp_path))
    store.put("k", [bytes(140_000)])
    writer = subprocess.Popen([sys.executable, "-c", _WRITE_OFTEN, str(tmp_path)])
    try:
        seen = set()
        while len(seen) < 50 and writer.poll() is None:
            data = store.get("k")
            assert len(data) == 140_000
            assert len(set(data)) == 1
            seen.add(data[0])
    finally:
        writer.kill()
        writer.wait()
    assert len(seen) == 50
    assert list(store.list("")) == ["k"]


def test_temporary_files_are_no_objects(tmp_path):
    store = open_store(str(tmp_path))
    seen = []

    def parts():
        yield b"begun"
        seen.append((store.list(""), [entry.name for entry in os.scandir(tmp_path)]))

    store.put("k", parts())
    listing, files = seen[0]
    assert listing == {}
    assert len(files) == 1


def test_files_of_unread_objects_are_written_over(tmp_path):
    store = open_store(str(tmp_path))
    store.put("deltas/1/a", [b"x" * 1000])
    inode = (tmp_path / "deltas/1/a").stat().st_ino
    store.delete(["deltas/1/a"], unread=True)
    assert store.list("") == {}
    assert store.put("deltas/2/a", [b"short"]) == 5
    assert (tmp_path / "deltas/2/a").stat().st_ino == inode
    assert store.get("deltas/2/a") == b"short", "the longer old content is cut off"
    store.delete(["deltas/2/a"], unread=True)
    store.put("state/1", [b"another kind"])
    assert (tmp_path / "state/1").stat().st_ino != inode
    store.close()
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == [], "nothing is left aside"
    store.put("deltas/3/a", [b"goes on"])
    assert store.get("deltas/3/a") == b"goes on"


def test_a_failed_write_over_an_old_file_shows_nothing(tmp_path):
    def parts():
        yield b"begun"
        raise RuntimeError("lost the thread")

    store = open_store(str(tmp_path))
    store.put("k/1", [b"x" * 1000])
    store.delete(["k/1"], unread=True)
    with pytest.raises(RuntimeError, match="lost the thread"):
        store.put("k/2", parts())
    assert store.list("") == {}
    store.close()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


class TestBadUris:
    @pytest.mark.parametrize("uri", ["", "  ", None, 7])
    def test_no_uri(self, uri):
        with pytest.raises(ConfigurationError, match="rendezvous URI"):
            open_store(uri)

    def test_unknown_scheme(self):
        with pytest.raises(ConfigurationError, match="unknown scheme 'sftpx'"):
            open_store("sftpx://host/run")

    def test_missing_driver_names_the_package(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "s3fs", None)  # as if it were not installed
        monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)  # nor imported before
        with pytest.raises(MissingDependencyError, match=r"pip install 'diloco-core\[s3\]'"):
            open_store("fsspec+s3://bucket/run")

    def test_missing_driver_of_another_scheme(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "adlfs", None)
        with pytest.raises(MissingDependencyError, match=r"diloco-core\[azure\]"):
            open_store("az://container/run")

    def test_two_slashes_name_a_host(self):
        with pytest.raises(ConfigurationError, match="three slashes"):
            open_store("file://runs/a")

    def test_a_file_in_the_way(self, tmp_path):
        (tmp_path / "file").write_text("x")
        with pytest.raises(StoreUnavailableError, match="cannot be written"):
            open_store(str(tmp_path / "file" / "run"))

    @pytest.mark.skipif(sys.platform != "linux", reason="even root cannot write in /proc, which only Linux has")
    def test_a_folder_that_nobody_may_write(self):
        with pytest.raises(StoreUnavailableError, match="cannot be written"):
            open_store("/proc/run")

    def test_an_unwritable_store(self):
        with pytest.raises(StoreUnavailableError, match="cannot be opened"):
            open_store("zip://run::file:///nowhere/at/all.zip")

    def test_a_store_that_can_only_be_read(self, tmp_path):
        with zipfile.ZipFile(tmp_path / "old.zip", "w") as archive:
            archive.writestr("run/manifest.json", "{}")
        with pytest.raises(StoreUnavailableError, match="cannot be written, read back"):
            open_store(f"zip://run::file://{tmp_path}/old.zip")


def test_disk_full_leaves_nothing_visible(tmp_path, monkeypatch):
    store = open_store(str(tmp_path))
    real = os.write
    calls = []

    def full(descriptor, data):
        calls.append(1)
        if len(calls) > 1:
            raise OSError(28, "No space left on device")
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(StoreUnavailableError, match="No space left"):
        store.put("k", [b"first", b"second"])
    monkeypatch.undo()
    assert list(Path(tmp_path).iterdir()) == []

"""What is particular to local folders, and URIs that cannot be used.

What every store promises is in ``test_laws.py``.
"""

import os
import subprocess
import sys
import zipfile

import pytest

from diloco_core import (
    ConfigurationError,
    StoreUnavailableError,
)
from diloco_core._store._api import creates_once
from diloco_core._store._drivers._folder import FolderStore
from diloco_core._store._drivers._remote import RemoteStore
from diloco_core._store._open import open_store
from diloco_protocol import MissingDependencyError

LARGE = 2**16  # bytes from which on the file of a deleted object is kept


def test_a_path_and_a_file_uri_are_the_same_folder(tmp_path):
    by_path, by_uri = open_store(str(tmp_path / "a b")), open_store((tmp_path / "a b").as_uri())
    by_path.put("x", [b"1"])
    assert isinstance(by_uri, FolderStore)
    assert by_uri.get("x") == b"1"


def test_other_schemes_go_through_fsspec():
    assert isinstance(open_store("memory://somewhere/run"), RemoteStore)


_WRITE_OFTEN = """
import sys
from diloco_core._store._api import creates_once; from diloco_core._store._open import open_store
store, value = open_store(sys.argv[1]), 0
while True:
    value = (value + 1) % 256
    store.put("k", [bytes([value]) * 70_000, bytes([value]) * 70_000])
"""


@pytest.mark.processes
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
    store.put("deltas/1/a", [b"x" * LARGE])
    inode = (tmp_path / "deltas/1/a").stat().st_ino
    store.delete(["deltas/1/a"], unread=True)
    assert store.list("") == {}
    assert store.put("deltas/2/a", [b"short"]) == 5
    assert (tmp_path / "deltas/2/a").stat().st_ino == inode
    assert store.get("deltas/2/a") == b"short", "the longer old content is cut off"
    store.put("deltas/2/a", [b"y" * LARGE])
    inode = (tmp_path / "deltas/2/a").stat().st_ino
    store.delete(["deltas/2/a"], unread=True)
    store.put("state/1", [b"another kind"])
    assert (tmp_path / "state/1").stat().st_ino != inode
    store.close()
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == [], (
        "nothing is left aside"
    )
    store.put("deltas/3/a", [b"goes on"])
    assert store.get("deltas/3/a") == b"goes on"


def test_records_do_not_take_the_files_of_large_objects(tmp_path):
    store = open_store(str(tmp_path))
    store.put("state/1", [b"x" * LARGE])
    inode = (tmp_path / "state/1").stat().st_ino
    store.create("state/1.done", b"a record")
    store.delete(["state/1.done", "state/1"], unread=True)
    store.create("state/2.done", b"a record")
    assert store.create("state/2", iter([b"y" * LARGE]))
    assert (tmp_path / "state/2").stat().st_ino == inode


def test_a_failed_write_over_an_old_file_shows_nothing(tmp_path):
    def parts():
        yield b"begun"
        raise RuntimeError("lost the thread")

    store = open_store(str(tmp_path))
    store.put("k/1", [b"x" * LARGE])
    store.delete(["k/1"], unread=True)
    with pytest.raises(RuntimeError, match="lost the thread"):
        store.put("k/2", parts())
    assert store.list("") == {}
    store.close()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


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


class TestBadUris:
    @pytest.mark.parametrize("uri", ["", "  ", None, 7])
    def test_no_uri(self, uri):
        with pytest.raises(ConfigurationError, match="rendezvous URI"):
            open_store(uri)

    def test_unknown_scheme(self):
        with pytest.raises(ConfigurationError, match="unknown scheme 'sftpx'") as error:
            open_store("sftpx://host/run")
        assert "s3://" in str(error.value)
        assert len(str(error.value)) < 300  # fsspec knows about sixty schemes

    def test_missing_driver_names_the_package(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "s3fs", None)  # as if it were not installed
        monkeypatch.delitem(
            sys.modules["fsspec.registry"]._registry, "s3", raising=False
        )  # nor imported before
        with pytest.raises(MissingDependencyError, match=r"pip install 'diloco-core\[s3\]'"):
            open_store("fsspec+s3://bucket/run")

    def test_missing_driver_of_another_scheme(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "adlfs", None)
        with pytest.raises(MissingDependencyError, match=r"diloco-core\[azure\]"):
            open_store("az://container/run")

    @pytest.mark.parametrize(
        ("typed", "meant"), [("s3:/bucket/run", "s3://bucket/run"), ("gs:/b/x", "gs://b/x")]
    )
    def test_one_slash_too_few_is_no_folder(self, tmp_path, monkeypatch, typed, meant):
        monkeypatch.chdir(tmp_path)
        with pytest.raises(ConfigurationError, match=meant):
            open_store(typed)
        assert not list(tmp_path.iterdir())

    def test_a_folder_may_have_a_colon_in_its_name(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        open_store("./s3:/bucket").put("k", [b"x"])
        assert (tmp_path / "s3:" / "bucket" / "k").exists()

    def test_two_slashes_name_a_host(self):
        with pytest.raises(ConfigurationError, match="three slashes"):
            open_store("file://runs/a")

    def test_a_file_in_the_way(self, tmp_path):
        (tmp_path / "file").write_text("x")
        with pytest.raises(StoreUnavailableError, match="cannot be written"):
            open_store(str(tmp_path / "file" / "run"))

    @pytest.mark.skipif(
        sys.platform != "linux", reason="even root cannot write in /proc, which only Linux has"
    )
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

"""Test a folder with more than regular files of ours: links, pipes, devices, strays."""

import errno
import os
import re
import socket
import stat
import threading

import pytest
from training_lab import PATIENCE

from diloco_core import (
    ConfigurationError,
    CorruptedObjectError,
    ObjectNotFoundError,
    StoreUnavailableError,
)
from diloco_core._store._drivers import _files as files
from diloco_core._store._open import open_store

LARGE = 2**16


@pytest.fixture
def outside(tmp_path):
    """A folder that has nothing to do with the run, with a file in it."""
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "0").write_bytes(b"precious" * LARGE)
    return folder


def in_time(act):
    """Return what ``act`` raises or returns; it must not hang."""
    result = []

    def run():
        try:
            result.append(act())
        except BaseException as error:
            result.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert result, "it hangs"
    return result[0]


def refused(acts, error, told, lasting=None):
    """None of the acts is done, or hangs; they raise an error that says why."""
    for act in acts:
        caught = in_time(act)
        assert isinstance(caught, error), caught
        assert re.search(told, str(caught))
        assert lasting is None or caught.lasting is lasting


def reads(store, key):
    return [lambda: store.get(key), lambda: store.open(key)]


def writes(store, key):
    return [
        lambda: store.put(key, [b"mine"]),
        lambda: store.put(key, [b"y" * LARGE]),
        lambda: store.delete([key]),
        lambda: store.delete([key], unread=True),
    ]


@pytest.mark.parametrize("when", ["it is an object", "it is kept", "it is being written"])
def test_a_backup_by_hard_links_keeps_what_it_had(store, run, tmp_path, when):
    def parts():
        yield b"x" * LARGE
        if when == "it is being written":
            os.link(*run.glob(".tmp-*"), tmp_path / "backup")

    store.put("deltas/0", parts())
    if when == "it is an object":
        os.link(run / "deltas" / "0", tmp_path / "backup")
    store.delete(["deltas/0"], unread=True)
    if when == "it is kept":
        os.link(*run.glob(".tmp-*"), tmp_path / "backup")
    store.put("deltas/1", [b"y" * LARGE])
    assert (tmp_path / "backup").read_bytes() == b"x" * LARGE
    assert store.get("deltas/1") == b"y" * LARGE
    assert list(run.glob(".tmp-*")) == []


def test_another_users_file_is_not_written_over(store, run, monkeypatch):
    store.put("deltas/0", [b"x" * LARGE])
    with (run / "deltas" / "0").open("rb") as kept:  # so that its number is not given to another
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        store.delete(["deltas/0"], unread=True)
        assert list(run.glob(".tmp-*")) == []
        store.put("deltas/1", [b"y" * LARGE])
        assert (run / "deltas" / "1").stat().st_ino != os.fstat(kept.fileno()).st_ino


@pytest.mark.parametrize("kind", ["a link", "a pipe"])
def test_in_place_of_a_file_that_is_kept(store, run, outside, kind):
    store.put("deltas/0", [b"x" * LARGE])
    store.delete(["deltas/0"], unread=True)
    (spare,) = run.glob(".tmp-*")
    spare.unlink()
    spare.symlink_to(outside / "0") if kind == "a link" else os.mkfifo(spare)
    assert in_time(lambda: store.put("deltas/1", [b"y" * LARGE])) == LARGE
    assert store.get("deltas/1") == b"y" * LARGE
    assert (outside / "0").read_bytes() == b"precious" * LARGE


class TestLinks:
    def test_in_place_of_an_object(self, store, run, outside):
        (run / "deltas").mkdir()
        link = run / "deltas" / "0"
        link.symlink_to(outside / "0")
        text = r"'.*/deltas/0' is a symbolic link"
        refused(reads(store, "deltas/0"), CorruptedObjectError, text)
        assert not store.create("deltas/0", b"mine")
        assert store.list("") == {}
        text = r"'.*/deltas/0' cannot be .*: it is a symbolic link"
        refused(writes(store, "deltas/0"), StoreUnavailableError, text, lasting=True)
        assert link.is_symlink()
        store.put("deltas/1", [b"y" * LARGE])
        assert (outside / "0").read_bytes() == b"precious" * LARGE

    def test_in_place_of_a_folder(self, store, run, outside):
        (run / "deltas").symlink_to(outside)
        more = [lambda: store.create("deltas/1", b"mine"), lambda: store.list("deltas/")]
        acts = [*reads(store, "deltas/0"), *writes(store, "deltas/0"), *more]
        text = r"'deltas' in it is a symbolic link, and only the run's own"
        refused(acts, StoreUnavailableError, text)
        assert store.list("") == {}
        (left,) = outside.iterdir()
        assert left.read_bytes() == b"precious" * LARGE
        assert list(run.glob(".tmp-*")) == []

    def test_to_the_run_itself_are_followed(self, tmp_path, run, store):
        (tmp_path / "shortcut").symlink_to(run)
        for uri in (str(tmp_path / "shortcut"), str(tmp_path / "shortcut" / "below")):
            through = open_store(uri)
            through.put("deltas/0", [b"x" * LARGE])
            through.delete(["deltas/0"], unread=True)
            assert through.create("deltas/1", iter([b"y" * LARGE]))
            assert through.get("deltas/1") == b"y" * LARGE
            through.close()
        assert list(store.list("")) == ["below/deltas/1", "deltas/1"]


def make(kind, path):
    if kind == "a named pipe":
        os.mkfifo(path)
    elif kind == "a socket":
        with socket.socket(socket.AF_UNIX) as end:
            end.bind(str(path))
    else:
        try:
            os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 3))
        except PermissionError:
            pytest.skip("only root makes devices")


@pytest.mark.parametrize("kind", ["a named pipe", "a socket", "a device"])
def test_what_is_not_a_file_is_named_and_not_opened(store, run, monkeypatch, kind):
    monkeypatch.chdir(run)  # the path of a socket must be short
    make(kind, "k")
    opened, real = [], os.open

    def note(path, *rest, **options):
        opened.append(path)
        return real(path, *rest, **options)

    monkeypatch.setattr(os, "open", note)
    regular = rf"is {kind}, and the objects of a run are regular files"
    refused(reads(store, "k"), CorruptedObjectError, f"/k' {regular}")
    assert "k" not in opened
    assert store.list("") == {}
    assert in_time(lambda: store.create("k", b"mine")) is False
    before = os.lstat("k")
    text = f"it {regular}. Remove what does not belong"
    refused(writes(store, "k"), StoreUnavailableError, text, lasting=True)
    assert os.lstat("k") == before, "it is neither replaced nor removed"
    assert list(run.glob(".tmp-*")) == []


def test_a_pipe_that_takes_the_place_of_a_file_hangs_nobody(store, run, monkeypatch):
    store.put("k", [b"value"])
    real = files._check_regular

    def then_a_pipe(status, path):
        real(status, path)
        (run / "k").unlink(missing_ok=True)
        os.mkfifo(run / "k")

    monkeypatch.setattr(files, "_check_regular", then_a_pipe)
    refused([lambda: store.get("k")], CorruptedObjectError, "is a named pipe")


def test_stray_files_are_not_listed(store, run):
    store.put("deltas/0", [b"x"])
    for name in (".DS_Store", "deltas/.DS_Store", "deltas/._0"):
        (run / name).write_bytes(b"stray")
    (run / "lost+found").mkdir()
    (run / "lost+found" / "0").write_bytes(b"stray")
    (run / "empty").mkdir()
    try:
        (run / os.fsdecode(b"deltas/\xff")).write_bytes(b"stray")
    except OSError as error:  # macOS takes text only
        assert error.errno == errno.EILSEQ  # noqa: PT017
    assert list(store.list("")) == list(store.list("deltas/")) == ["deltas/0"]


@pytest.mark.parametrize("key", ["../k", "a/../k", "/k", "a//k", "k/", ".k", "a/.k", "", "a\0b"])
def test_a_key_leads_nowhere_else(store, tmp_path, key):
    (tmp_path / "k").write_bytes(b"precious")
    acts = [*reads(store, key), *writes(store, key), lambda: store.create(key, b"x")]
    refused(acts, ConfigurationError, "is not a key")
    assert (tmp_path / "k").read_bytes() == b"precious"


def test_a_folder_that_is_gone_is_not_made_again(store, run):
    """It may be a mount: the disk below it is not where the run is."""
    run.rmdir()
    more = [lambda: store.create("k", b"x"), lambda: store.list("")]
    acts = [lambda: store.get("k"), *writes(store, "k")[:3], *more]
    refused(acts, StoreUnavailableError, r"the run's folder '.*' is gone", lasting=False)
    assert not run.exists()
    reader = open_store(str(run), reading=True)
    assert reader.list("") == {}
    with pytest.raises(ObjectNotFoundError):
        reader.get("k")

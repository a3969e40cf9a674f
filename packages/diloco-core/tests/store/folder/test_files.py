"""What is in a folder beside regular files that are ours alone: links, pipes, devices, strays."""

import errno
import os
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
    """What ``act`` raises or returns; it must not hang."""
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


class TestHardLinks:
    """A backup by hard links keeps what it had when it was made."""

    def test_of_an_object(self, store, run, tmp_path):
        store.put("deltas/0", [b"x" * LARGE])
        os.link(run / "deltas" / "0", tmp_path / "backup")
        store.delete(["deltas/0"], unread=True)
        store.put("deltas/1", [b"y" * LARGE])
        assert (tmp_path / "backup").read_bytes() == b"x" * LARGE

    def test_of_a_file_that_is_kept(self, store, run, tmp_path):
        store.put("deltas/0", [b"x" * LARGE])
        store.delete(["deltas/0"], unread=True)
        (spare,) = run.glob(".tmp-*")
        os.link(spare, tmp_path / "backup")
        store.put("deltas/1", [b"y" * LARGE])
        assert (tmp_path / "backup").read_bytes() == b"x" * LARGE
        assert store.get("deltas/1") == b"y" * LARGE
        assert list(run.glob(".tmp-*")) == []

    def test_of_a_file_that_is_being_written(self, store, run, tmp_path):
        def parts():
            yield b"x" * LARGE
            (temporary,) = run.glob(".tmp-*")
            os.link(temporary, tmp_path / "backup")

        store.put("deltas/0", parts())
        store.delete(["deltas/0"], unread=True)
        store.put("deltas/1", [b"y" * LARGE])
        assert (tmp_path / "backup").read_bytes() == b"x" * LARGE

    def test_without_one_the_file_is_used_again(self, store, run):
        store.put("deltas/0", [b"x" * LARGE])
        number = (run / "deltas" / "0").stat().st_ino
        store.delete(["deltas/0"], unread=True)
        store.put("deltas/1", [b"y" * LARGE])
        assert (run / "deltas" / "1").stat().st_ino == number


def test_another_users_file_is_not_written_over(store, run, monkeypatch):
    store.put("deltas/0", [b"x" * LARGE])
    number = (run / "deltas" / "0").stat().st_ino
    kept = (run / "deltas" / "0").open("rb")  # so that its number is not given to another
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    store.delete(["deltas/0"], unread=True)
    assert list(run.glob(".tmp-*")) == []
    store.put("deltas/1", [b"y" * LARGE])
    assert (run / "deltas" / "1").stat().st_ino != number
    kept.close()


class TestLinks:
    def test_in_place_of_a_file_that_is_kept(self, store, run, outside):
        store.put("deltas/0", [b"x" * LARGE])
        store.delete(["deltas/0"], unread=True)
        (spare,) = run.glob(".tmp-*")
        spare.unlink()
        spare.symlink_to(outside / "0")
        store.put("deltas/1", [b"y" * LARGE])
        assert (outside / "0").read_bytes() == b"precious" * LARGE
        assert store.get("deltas/1") == b"y" * LARGE

    def test_in_place_of_an_object(self, store, run, outside):
        (run / "deltas").mkdir()
        link = run / "deltas" / "0"
        link.symlink_to(outside / "0")
        for look in (store.get, store.open):
            with pytest.raises(CorruptedObjectError, match=r"'.*/deltas/0' is a symbolic link"):
                look("deltas/0")
        assert not store.create("deltas/0", b"mine")
        assert store.list("") == {}
        for act in (
            lambda: store.put("deltas/0", [b"mine"]),
            lambda: store.put("deltas/0", [b"y" * LARGE]),
            lambda: store.delete(["deltas/0"]),
            lambda: store.delete(["deltas/0"], unread=True),
        ):
            with pytest.raises(
                StoreUnavailableError, match=r"'.*/deltas/0' cannot be .*: it is a symbolic link"
            ) as caught:
                act()
            assert caught.value.lasting
        assert link.is_symlink()
        store.put("deltas/1", [b"y" * LARGE])
        assert (outside / "0").read_bytes() == b"precious" * LARGE

    def test_in_place_of_a_folder(self, store, run, outside):
        (run / "deltas").symlink_to(outside)
        for act in (
            lambda: store.put("deltas/0", [b"mine"]),
            lambda: store.create("deltas/1", b"mine"),
            lambda: store.get("deltas/0"),
            lambda: store.open("deltas/0"),
            lambda: store.list("deltas/"),
            lambda: store.delete(["deltas/0"]),
            lambda: store.delete(["deltas/0"], unread=True),
        ):
            with pytest.raises(
                StoreUnavailableError,
                match=r"'deltas' in it is a symbolic link, and only the run's own",
            ):
                act()
        assert store.list("") == {}
        assert {path.name: path.read_bytes() for path in outside.iterdir()} == {
            "0": b"precious" * LARGE
        }
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
    for look in (store.get, store.open):
        error = in_time(lambda look=look: look("k"))
        assert isinstance(error, CorruptedObjectError)
        assert f"/k' is {kind}, and the objects of a run are regular files" in str(error)
    assert "k" not in opened
    assert store.list("") == {}
    assert in_time(lambda: store.create("k", b"mine")) is False
    before = os.lstat("k")
    for act in (
        lambda: store.put("k", [b"mine"]),
        lambda: store.delete(["k"]),
        lambda: store.delete(["k"], unread=True),
    ):
        error = in_time(act)
        assert isinstance(error, StoreUnavailableError)
        assert error.lasting
        assert (
            f"it is {kind}, and the objects of a run are regular files. Remove what does not belong"
            in str(error)
        )
    assert os.lstat("k") == before, "it is neither replaced nor removed"
    assert list(run.glob(".tmp-*")) == []


def test_a_pipe_that_takes_the_place_of_a_file_at_the_last_moment_hangs_nobody(
    store, run, monkeypatch
):
    store.put("k", [b"value"])
    real = files._check_regular

    def then_a_pipe(status, path):
        real(status, path)
        (run / "k").unlink(missing_ok=True)
        os.mkfifo(run / "k")

    monkeypatch.setattr(files, "_check_regular", then_a_pipe)
    error = in_time(lambda: store.get("k"))
    assert isinstance(error, CorruptedObjectError)
    assert "is a named pipe" in str(error)


def test_a_pipe_in_place_of_a_file_that_is_kept_hangs_nobody(store, run):
    store.put("deltas/0", [b"x" * LARGE])
    store.delete(["deltas/0"], unread=True)
    (spare,) = run.glob(".tmp-*")
    spare.unlink()
    os.mkfifo(spare)
    assert in_time(lambda: store.put("deltas/1", [b"y" * LARGE])) == LARGE
    assert store.get("deltas/1") == b"y" * LARGE


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
    for act in (
        lambda: store.put(key, [b"x"]),
        lambda: store.create(key, b"x"),
        lambda: store.get(key),
        lambda: store.open(key),
        lambda: store.delete([key]),
    ):
        with pytest.raises(ConfigurationError, match="is not a key"):
            act()
    assert (tmp_path / "k").read_bytes() == b"precious"


def test_a_folder_that_is_gone_is_not_made_again(store, run):
    """It may be a mount: the disk below it is not where the run is."""
    store.put("k", [b"x"])
    (run / "k").unlink()
    run.rmdir()
    for act in (
        lambda: store.put("k", [b"x"]),
        lambda: store.create("k", b"x"),
        lambda: store.get("k"),
        lambda: store.list(""),
        lambda: store.delete(["k"]),
    ):
        with pytest.raises(StoreUnavailableError, match=r"the run's folder '.*' is gone") as caught:
            act()
        assert not caught.value.lasting
    assert not run.exists()
    reader = open_store(str(run), reading=True)
    assert reader.list("") == {}
    with pytest.raises(ObjectNotFoundError):
        reader.get("k")

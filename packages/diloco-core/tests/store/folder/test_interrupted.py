"""Folders that are made and given up, power cuts, and what a long-stopped process finds."""

import errno
import os
import stat

import pytest

from diloco_core import ConfigurationError, StoreUnavailableError, connect
from diloco_core._store._drivers import _files as files
from diloco_core._store._open import open_store
from diloco_core._store._patient import Patient

LARGE = 2**16


class TestFoldersThatAreMade:
    @pytest.fixture
    def base(self, tmp_path):
        (tmp_path / "mine").mkdir()
        return tmp_path / "mine"

    def test_for_nothing_are_removed(self, base, monkeypatch):
        with pytest.raises(StoreUnavailableError, match="File name too long"):
            connect(base / "a" / "b" / ("x" * 300), rank=0, world_size=1)
        real = os.mkdir

        def refuses(path, *rest, **options):
            if str(path).endswith("c"):
                raise OSError(errno.EACCES, "Permission denied")
            return real(path, *rest, **options)

        for place, patched in (
            ("a/b/c", (os, "mkdir", refuses)),
            ("a/b", (files, "create_file", lambda *_: refuses("c"))),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(*patched)
                with pytest.raises(StoreUnavailableError, match="be written: Permission denied"):
                    connect(base / place, rank=0, world_size=1)
        assert list(base.iterdir()) == []

    def test_for_a_run_that_this_store_cannot_carry_are_removed(self, base, monkeypatch):
        """But not those that others have made, or in which something is."""
        (base / "theirs").mkdir()

        def somebody_comes(_):
            (base / "theirs" / "a" / "note").touch()
            return False

        for place, creates_once in (
            ("mine/b", lambda _: False),
            ("theirs", lambda _: False),
            ("theirs/a/b", somebody_comes),
        ):
            monkeypatch.setattr(Patient, "creates_once", creates_once)
            with pytest.raises(ConfigurationError, match="created twice"):
                connect(base / place, rank=0, world_size=2, min_replicas=1)
        left = [path.relative_to(base).as_posix() for path in sorted(base.rglob("*"))]
        assert left == ["theirs", "theirs/a", "theirs/a/note"]


class TestPowerCuts:
    @pytest.fixture
    def acts(self, monkeypatch):
        """Return what is synced and named, in order."""
        acts, fsync = [], os.fsync

        def note(descriptor):
            acts.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
            fsync(descriptor)

        monkeypatch.setattr(os, "fsync", note)
        for name in ("replace", "link", "mkdir"):
            real = getattr(os, name)

            def noted(*args, name=name, real=real, **options):
                acts.append(name)
                return real(*args, **options)

            monkeypatch.setattr(os, name, noted)
        return acts

    def test_records_are_on_the_disk_and_payloads_are_not_waited_for(self, store, acts):
        store.put("beats/0", [b"1"])
        assert acts == ["file", "mkdir", "folder", "replace", "folder"]
        for number, content in enumerate((b"record", iter([b"record"])), start=1):
            acts.clear()
            assert store.create(f"beats/{number}", content)
            assert acts == ["file", "link", "folder"]
        acts.clear()
        store.put("state", [bytes(LARGE)])
        assert acts == ["replace"]

    def test_a_disk_that_fails_is_named_and_nothing_is_visible(self, store, run, monkeypatch):
        def fails(descriptor):
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(os, "fsync", fails)
        for write in (lambda: store.put("k", [b"x"]), lambda: store.create("k", b"x")):
            text = r"'.*/k' cannot be written: Input/output error"
            with pytest.raises(StoreUnavailableError, match=text) as caught:
                write()
            assert not caught.value.lasting
        assert list(run.iterdir()) == []

    def test_a_file_system_that_cannot_sync_folders_will_do(self, store, monkeypatch):
        real = os.fsync

        def only_files(descriptor):
            if stat.S_ISDIR(os.fstat(descriptor).st_mode):
                raise OSError(errno.EINVAL, "Invalid argument")
            real(descriptor)

        monkeypatch.setattr(os, "fsync", only_files)
        store.put("k", [b"x"])
        assert store.create("k2", b"x")


class TestStoppedForLong:
    """A process that stands still in the middle of an act, while another cleans up, writes and
    deletes; then it goes on.
    """

    @pytest.fixture
    def other(self, run):
        opened = open_store(str(run))
        yield opened
        opened.close()

    @pytest.mark.parametrize("size", [10, LARGE])
    @pytest.mark.parametrize("spare", [True, False])
    @pytest.mark.parametrize("write", ["put", "create"])
    def test_in_a_write_whose_file_was_cleaned_away(self, store, run, other, size, spare, write):
        if spare:
            store.put("deltas/0", [b"x" * LARGE])
            store.delete(["deltas/0"], unread=True)

        def parts():
            yield b"z" * (size // 2)
            for temporary in run.glob(".tmp-*"):
                temporary.unlink()
            for number in range(3):  # they may get the blocks, but never the file that is open
                other.put(f"deltas/{number}", [b"o" * LARGE])
            yield b"z" * (size - size // 2)

        with pytest.raises(StoreUnavailableError, match="temporary file was removed"):
            getattr(store, write)("deltas/zombie", parts())
        assert {other.get(key) for key in other.list("")} == {b"o" * LARGE}
        assert len(other.list("")) == 3
        assert getattr(store, write)("deltas/zombie", [b"z"]), "it can be repeated"

    @pytest.mark.parametrize("size", [10, LARGE])
    def test_between_writing_and_creating(self, store, other, monkeypatch, size):
        real = os.link

        def late(*args, **options):
            monkeypatch.setattr(os, "link", real)
            assert other.create("commits/1", iter([b"o" * size]))
            return real(*args, **options)

        monkeypatch.setattr(os, "link", late)
        assert not store.create("commits/1", iter([b"z" * size]))
        assert other.get("commits/1") == b"o" * size

    def test_between_creating_and_cleaning_up(self, store, run, other, monkeypatch):
        """The object has two names, and must not be written over while one of them is known."""
        real = os.unlink

        def late(path, **options):
            monkeypatch.setattr(os, "unlink", real)
            other.delete(["state/1"], unread=True)
            other.put("state/2", [b"o" * LARGE])
            return real(path, **options)

        monkeypatch.setattr(os, "unlink", late)
        assert store.create("state/1", iter([b"z" * LARGE]))
        assert other.get("state/2") == b"o" * LARGE
        assert list(run.glob(".tmp-*")) == []

    def test_in_a_deletion(self, store, run, other, monkeypatch):
        """What another has deleted meanwhile is no loss, and what it has written stays."""
        for number in range(2):
            store.put(f"deltas/{number}", [b"x" * LARGE])
        real = files.keep_aside

        def late(root, folder, name, spare):
            monkeypatch.setattr("diloco_core._store._drivers._files.keep_aside", real)
            other.delete(["deltas/0", "deltas/1"], unread=True)
            other.put("deltas/2", [b"o" * LARGE])
            real(root, folder, name, spare)

        monkeypatch.setattr("diloco_core._store._drivers._files.keep_aside", late)
        store.delete(["deltas/0", "deltas/1"], unread=True)
        store.put("deltas/3", [b"z" * LARGE])
        assert other.get("deltas/2") == b"o" * LARGE
        assert list(other.list("")) == ["deltas/2", "deltas/3"]

    def test_before_it_takes_a_kept_file_that_became_anothers_object(self, store, run, other):
        """However that came about: a file with another name too is never written over."""
        store.put("deltas/0", [b"x" * LARGE])
        store.delete(["deltas/0"], unread=True)
        (spare,) = run.glob(".tmp-*")
        (run / "state").mkdir()
        os.link(spare, run / "state" / "0")
        store.put("deltas/1", [b"z" * LARGE])
        assert other.get("state/0") == b"x" * LARGE

"""Objects as files in a local or shared folder: atomic by rename, exclusive by hard link."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from urllib.parse import unquote, urlparse

from ..._errors import ConfigurationError, ObjectNotFoundError, StoreUnavailableError
from ..._redact import redact_uri
from .._api import RECORD_BYTES, Buffer, read_bytes, too_large
from . import _files as disk

_ADVICE = (
    "Check that this user may read and write the run's folder, and that the file system is mounted "
    "and has room."
)


class FolderStore:
    """A folder as an object store; see :class:`._api.Store`.

    Thread-safe, and safe between processes.

    An object is written to a temporary file, which is then renamed (``put``) or hard-linked
    (``create``, which POSIX makes exclusive). The files of deleted objects that are no longer read
    are reused for later objects, since getting fresh pages from the kernel costs more than filling
    them. The files kept for this hold about as many bytes as are written between two deletions.
    Only a regular file of this user that has no other name is reused, so backups by hard links do
    not change.

    The folder itself may be reached through symbolic links. A link, a pipe, a socket or a device
    below it is never followed, read, written, replaced or removed: if it is in the place of an
    object, an error names it, and listings leave it out.

    Objects of less than 64 KiB (all records) are on the disk, with their names, before ``put`` and
    ``create`` return. Larger ones are not synced: after a power cut a payload may be missing or
    incomplete while the record that names it is there. The checksums show that, and damaged objects
    can be written again from the rest of the run.

    A full disk is an outage that may end: the files kept for reuse are deleted, and the write can
    be repeated.

    Temporary files are in the folder itself. Opening the store and deleting unread objects removes
    those of processes that were killed: at once if they ran on this machine (and in this
    container), after an hour if they ran on another. A process that was stopped for longer than
    that finds its file gone when it continues: its write fails with an error that says so, nothing
    else is affected, and the write can be repeated.
    """

    near = True
    retries = False
    exclusive = True
    largest: int | None = None
    background = None
    requests = None
    patience = 60.0
    downtime = 0.0
    #: Whether it was opened for a run that should be there already: then no folder is left behind
    #: that stayed empty.
    of_earlier_run = False

    def __init__(self, uri: str, *, reading: bool = False) -> None:
        self.root = _folder(uri)
        self.uri = self.root.as_uri()
        self._names = itertools.count()
        self._spares: dict[tuple[int, str], disk.Spares] = {}
        self._lock = threading.Lock()
        self._store_name = disk.new_store_name(self)
        self._reading = reading
        self._made: list[Path] = []
        if reading:
            return  # nothing is created: a folder that does not exist is like an empty store
        failure = f"the folder {str(self.root)!r} cannot be written"
        with self._named(failure, "Use a folder that this user may create and write to."):
            try:
                disk.make_folders(self.root, self._made)
                with self._opened() as root:
                    probe = self._temporary()
                    os.close(disk.create_file(root, probe))
                    os.unlink(probe, dir_fd=root)
                disk.remove_leftovers(self.root)
            except BaseException:
                disk.remove_folders(self._made)
                raise

    def put(self, key: str, parts: Iterable[Buffer]) -> int:
        """Write an object in one step; see :meth:`._api.Store.put`."""
        with (
            self._written(key, parts) as (root, temporary, size),
            self._named(
                f"{self._path(key)!r} cannot be written",
                "Check that this user may write to the run's folder.",
            ),
        ):
            self._publish(root, key, size, temporary, disk.rename)
        return size

    def create(self, key: str, data: bytes | Iterable[Buffer]) -> bool:
        """Write an object unless the key exists; see :meth:`._api.Store.create`."""
        small = isinstance(data, bytes)
        parts = [data] if isinstance(data, bytes) else data
        with (
            self._written(key, parts, small=small) as (root, temporary, size),
            self._named(
                f"{self._path(key)!r} cannot be created",
                "Objects are created by hard link: use a folder that this user may write to, on a "
                "file system that has hard links (FAT and some network shares do not).",
            ),
        ):
            try:
                self._publish(root, key, size, temporary, disk.link)
            except FileExistsError:
                return False
        return True

    def get(self, key: str, largest: int = RECORD_BYTES) -> bytes:
        """Read a whole object; see :meth:`._api.Store.get`."""
        with self.open(key) as reader:
            if reader.size > largest:
                raise too_large(f"{self.uri}/{key}", reader.size, largest)
            return read_bytes(reader, 0, reader.size)

    # The file knows its size
    def open(self, key: str, size: int | None = None) -> disk.FileReader:  # noqa: ARG002
        """Open an object for ranged reads; see :meth:`._api.Store.open`."""
        *folders, name = disk.split(key)
        try:
            with self._opened() as root, disk.opened_below(root, folders) as folder:
                return disk.open_to_read(folder, name, self._path(key))
        except FileNotFoundError:
            pass
        except OSError as error:
            raise disk.unreadable(self._path(key), error) from error
        # Not where the system's error is handled: its text would be looked through for secrets, at
        # every look at the log.
        raise ObjectNotFoundError(f"there is no object {key!r} in {self.uri}")

    def list(self, prefix: str) -> dict[str, int]:
        """Keys below a folder and their sizes; see :meth:`._api.Store.list`.

        Left out is anything that is not a regular file, or whose name begins with a dot.
        """
        sizes_by_key: dict[str, int] = {}
        top = prefix.strip("/")
        folders = [disk.split(top) if top else []]
        # A file or folder that vanishes while it is listed counts as not there.
        with (
            self._named(f"{str(self.root)!r} cannot be opened"),
            contextlib.suppress(FileNotFoundError),
            self._opened() as root,
        ):
            while folders:
                names = folders.pop()
                place = "".join(f"{name}/" for name in names)
                subfolders: list[str] = []
                with (
                    self._named(f"{self._path(place.rstrip('/'))!r} cannot be listed"),
                    contextlib.suppress(FileNotFoundError),
                    disk.opened_below(root, names) as folder,
                ):
                    for name, size in disk.sizes(folder, subfolders):
                        sizes_by_key[place + name] = size
                folders += [[*names, name] for name in subfolders]
        return dict(sorted(sizes_by_key.items()))

    def delete(self, keys: Iterable[str], *, unread: bool = False) -> None:
        """Delete objects; see :meth:`._api.Store.delete`."""
        if unread:
            disk.remove_leftovers(self.root)
        for key in keys:
            *folders, name = disk.split(key)
            with (
                self._named(f"{self._path(key)!r} cannot be deleted"),
                contextlib.suppress(FileNotFoundError),
                self._opened() as root,
            ):
                with (
                    contextlib.suppress(FileNotFoundError),
                    disk.opened_below(root, folders) as folder,
                ):
                    disk.check_replaceable(folder, name)
                    if not (unread and self._keep(key, root, folder, name)):
                        os.unlink(name, dir_fd=folder)
                disk.remove_empty(root, folders)

    def close(self) -> None:
        """Remove the files kept for reuse; see :meth:`._api.Store.close`."""
        with self._lock:
            spares, self._spares = self._spares, {}
        for name in itertools.chain.from_iterable(kept.files for kept in spares.values()):
            (self.root / name).unlink(missing_ok=True)
        if self.of_earlier_run:
            disk.remove_folders(self._made)

    def unmake(self) -> None:
        """Remove the folders that this store has made, if they are empty.

        Called when what the store was opened for has failed.
        """
        self.close()
        disk.remove_folders(self._made)

    def _spares_of(self, key: str) -> disk.Spares:
        # Separate for each process: after a fork, both would otherwise write over the same file.
        return self._spares.setdefault((os.getpid(), key.partition("/")[0]), disk.Spares())

    def _keep(self, key: str, root: int, folder: int, name: str) -> bool:
        """Keep a large object's file, to be written over by the next one of the same top folder."""
        with self._lock:
            spares = self._spares_of(key)
            spares.writing = False
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if status.st_size < disk.LARGE_BYTES or not spares.has_room(status.st_size):
                return False
            if not disk.is_ours_alone(status, os.fstat(root)):
                return False
            spare = self._temporary()
            disk.keep_aside(root, folder, name, spare)
            spares.files[spare] = status.st_size
        return True

    def _begin(self, root: int, key: str, small: bool) -> tuple[str, int]:
        """Name and descriptor of a file to write an object into. No reader sees it yet."""
        with self._lock:
            files = {} if small else self._spares_of(key).files
            spare = files.popitem()[0] if files else None
        if spare is not None:
            descriptor = disk.open_to_write_over(root, spare)
            if descriptor is not None:
                os.utime(descriptor)  # so that it counts as in use again
                return spare, descriptor
            # The folder was cleaned up by others, or the file has been given another name, too.
            disk.unlink(root, spare)
        name = self._temporary()
        return name, disk.create_file(root, name)

    def _path(self, key: str) -> str:
        return f"{self.root}/{key}"

    def _temporary(self) -> str:
        return disk.temporary_name(self._store_name, next(self._names))

    @contextlib.contextmanager
    def _written(
        self, key: str, parts: Iterable[Buffer], *, small: bool = False
    ) -> Iterator[tuple[int, str, int]]:
        """Write an object to a file that no reader sees.

        The context is the descriptor of the run's folder, the file's name and its size in bytes.
        Unless the file was renamed, it is removed at the end.
        """
        disk.split(key)
        failure = f"{self._path(key)!r} cannot be written"
        advice = "Readers do not see any part of it."
        writing = partial(self._named, failure, advice)
        with contextlib.ExitStack() as stack:
            with writing():
                root = stack.enter_context(self._opened())
                temporary, descriptor = self._begin(root, key, small)
            stack.callback(disk.unlink, root, temporary)
            try:
                size = 0
                for part in parts:  # an error that the parts raise is not an error of writing
                    try:
                        size += _write_all(descriptor, part)
                    except OSError as error:
                        raise self._failed(error, failure, advice) from error
                with writing():
                    # A file that is written over may have been longer.
                    os.ftruncate(descriptor, size)
                    if size < disk.LARGE_BYTES:
                        os.fsync(descriptor)
                if size >= disk.LARGE_BYTES:
                    with self._lock:
                        self._spares_of(key).count(size)
            finally:
                os.close(descriptor)
            yield root, temporary, size

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        """The descriptor of the run's folder.

        If it is gone it is not made again: it may be a mount that is away for now.
        """
        try:
            root = os.open(self.root, disk.FOLDER)
        except FileNotFoundError:
            if self._reading:
                raise
            raise StoreUnavailableError(
                f"the run's folder {str(self.root)!r} is gone: it was removed, or its file system "
                "is not mounted any more. Mount it again, or put a copy of it back; if you cannot, "
                "begin a new run from a checkpoint."
            ) from None
        try:
            yield root
        finally:
            os.close(root)

    def _publish(
        self,
        root: int,
        key: str,
        size: int,
        temporary: str,
        act: Callable[[str, str, int, int], None],
    ) -> None:
        """Give an object its name in a folder that another replica may remove while it is empty."""
        *folders, name = disk.split(key)
        for _ in range(100):
            with (
                contextlib.suppress(FileNotFoundError),
                disk.opened_below(root, folders, make=True) as folder,
            ):
                act(temporary, name, root, folder)
                if size < disk.LARGE_BYTES:
                    disk.sync_folder(folder)
                return
            if not os.access(temporary, os.F_OK, dir_fd=root):
                break
        raise FileNotFoundError(
            errno.ENOENT,
            "its temporary file was removed, as happens when a process has not run for an hour, "
            "or the folder is being emptied",
        )

    @contextlib.contextmanager
    def _named(self, failure: str, advice: str = _ADVICE) -> Iterator[None]:
        """Turn the system's errors into the store's; ``failure`` says what could not be done."""
        try:
            yield
        except OSError as error:
            raise self._failed(error, failure, advice) from error

    def _failed(self, error: OSError, failure: str, advice: str) -> StoreUnavailableError:
        if error.errno in disk.FULL:
            self.close()  # the files kept for reuse take room that is needed now
        return disk.unavailable(f"{failure}: {error.strerror or error}. {advice}", error)


def whole_path(path: str) -> Path:
    """The absolute path that a path means; ``~`` at its beginning is a home folder.

    Raises:
        ConfigurationError: It begins with a user whose home folder is not known here.
    """
    expanded = os.path.expanduser(path)  # noqa: PTH111 - which raises nothing
    if expanded.startswith("~"):
        raise ConfigurationError(
            f"{path!r} begins with {expanded.partition('/')[0]!r}, whose home folder is not known "
            "here: write the whole path"
        )
    return Path(expanded).absolute()


def _folder(uri: str) -> Path:
    if "://" not in uri:
        return whole_path(uri)
    parsed = urlparse(uri)
    if parsed.netloc not in {"", "localhost"} or not parsed.path:
        raise ConfigurationError(
            f"{redact_uri(uri)!r} names a host; write a folder as file:///absolute/path, with "
            "three slashes"
        )
    return Path(unquote(parsed.path))


def _write_all(descriptor: int, part: Buffer) -> int:
    view = memoryview(part).cast("B")
    size, done = len(view), 0
    while done < size:
        done += os.write(descriptor, view[done:] if done else view)
    return size

"""Objects as files in a local or shared folder: atomic by rename, exclusive by hard link."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeVar
from urllib.parse import unquote, urlparse

from ._errors import ConfigurationError, CorruptedObjectError, ObjectNotFoundError, StoreUnavailableError
from ._sealed import RECORD_BYTES
from ._store import too_large
from ._store_temporary import LARGE_BYTES, Spares, new_life, remove_leftovers, temporary_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import TracebackType

    from ._store import Buffer

T = TypeVar("T")

# What network file systems say while their server is away, and what passes when others let go of something.
_PASSING = {
    errno.EIO,
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.ENETDOWN,
    errno.ENETUNREACH,
    errno.ENOTCONN,
    errno.ECONNRESET,
    errno.EREMOTEIO if hasattr(errno, "EREMOTEIO") else errno.EIO,
    errno.EAGAIN,
    errno.EBUSY,
    errno.ENOLCK,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
}


class FolderStore:
    """A folder as an object store; see :class:`._store.Store`. Thread-safe, and safe between processes.

    An object is written to a temporary file, then renamed (``put``) or hard-linked (``create``, which POSIX makes
    exclusive). Files of deleted objects that nobody reads any more are written over by later ones, since getting fresh
    pages from the kernel costs more than filling them; they hold no more bytes than are written between two deletions.
    Nothing is synced to the disk device: a power cut may lose or tear recent objects, which their checksums then show.

    Temporary files lie in the folder itself. Whoever opens the store or deletes unread objects removes those of processes
    that were killed: at once those of this machine (and container), after an hour those of others.
    """

    near = True
    retries = False
    exclusive = True
    largest: int | None = None
    patience = 60.0
    downtime = 0.0

    def __init__(self, uri: str, *, reading: bool = False) -> None:
        self.root = _folder(uri)
        self.uri = self.root.as_uri()
        self._names = itertools.count()
        self._spares: dict[tuple[int, str], Spares] = {}
        self._lock = threading.Lock()
        self._life = new_life(self)
        if reading:
            return  # nothing is made, and what is not there is not found
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            probe = self._temporary()
            probe.write_bytes(b"")
            probe.unlink()
            remove_leftovers(self.root)
        except OSError as error:
            raise _unavailable(
                f"the folder {str(self.root)!r} cannot be written: {error.strerror or error}. "
                "Name a folder that this user may create and write.",
                error,
            ) from error

    def put(self, key: str, parts: Iterable[Buffer]) -> int:
        """Write an object in one step; see :meth:`._store.Store.put`."""
        temporary, size = self._write(key, parts)
        path = self._path(key)
        try:
            _in_its_folder(path, lambda: temporary.replace(path))
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise _unavailable(f"{str(path)!r} cannot be written: {error.strerror or error}", error) from error
        return size

    def create(self, key: str, data: bytes | Iterable[Buffer]) -> bool:
        """Write an object unless the key exists; see :meth:`._store.Store.create`."""
        if isinstance(data, bytes):
            temporary, _ = self._write(key, [data], small=True)
        else:
            temporary, _ = self._write(key, data)
        try:
            path = self._path(key)
            _in_its_folder(path, lambda: os.link(temporary, path))
        except FileExistsError:
            return False
        except OSError as error:
            raise _unavailable(
                f"{str(path)!r} cannot be created: {error.strerror or error}. Objects are created by hard link: name a folder "
                "that this user may write, on a file system that has hard links (FAT and some network shares have none).",
                error,
            ) from error
        finally:
            temporary.unlink(missing_ok=True)
        return True

    def get(self, key: str, largest: int = RECORD_BYTES) -> bytes:
        """Read a whole object; see :meth:`._store.Store.get`."""
        with self.open(key) as reader:
            if reader.size > largest:
                raise too_large(f"{self.uri}/{key}", reader.size, largest)
            data = bytearray(reader.size)
            reader.read_into(0, memoryview(data))
        return bytes(data)

    def open(self, key: str, size: int | None = None) -> FileReader:  # noqa: ARG002 - the file tells
        """Open an object for ranged reads; see :meth:`._store.Store.open`."""
        path = self._path(key)
        try:
            return FileReader(path, os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        except FileNotFoundError:
            raise self._missing(key) from None
        except OSError as error:
            raise _unreadable(path, error) from error

    def list(self, prefix: str) -> dict[str, int]:
        """Keys below a folder and their sizes; see :meth:`._store.Store.list`.

        What has a name that begins with a dot is no object: it is ours, or the file system's (``.nfs...``, ``.snapshot``).
        """
        found: dict[str, int] = {}
        folders = [self._path(prefix.rstrip("/")) if prefix.strip("/") else self.root]
        while folders:
            folder = folders.pop()
            # A file or folder may vanish while it is listed: then it is not there.
            with (
                _named(f"{str(folder)!r} cannot be listed"),
                contextlib.suppress(FileNotFoundError),
                os.scandir(folder) as entries,
            ):
                for entry in entries:
                    if entry.name.startswith("."):
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(Path(entry.path))
                    else:
                        with contextlib.suppress(FileNotFoundError):
                            found[Path(entry.path).relative_to(self.root).as_posix()] = entry.stat().st_size
        return dict(sorted(found.items()))

    def delete(self, keys: Iterable[str], *, unread: bool = False) -> None:
        """Remove objects; see :meth:`._store.Store.delete`."""
        if unread:
            remove_leftovers(self.root)
        for key in keys:
            path = self._path(key)
            with _named(f"{str(path)!r} cannot be deleted"):
                if not (unread and self._keep(key)):
                    path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # not empty, or already gone
                for folder in path.parents[: len(path.parents) - len(self.root.parents) - 1]:
                    folder.rmdir()

    def close(self) -> None:
        """Remove the files kept for reuse; see :meth:`._store.Store.close`."""
        with self._lock:
            spares, self._spares = self._spares, {}
        for path in itertools.chain.from_iterable(kept.files for kept in spares.values()):
            path.unlink(missing_ok=True)

    def _spares_of(self, key: str) -> Spares:
        # By process: after a fork, both would write over the same file.
        return self._spares.setdefault((os.getpid(), key.partition("/")[0]), Spares())

    def _keep(self, key: str) -> bool:
        """Set a large object's file aside, to be written over by the next large object of the same top folder."""
        with self._lock, contextlib.suppress(FileNotFoundError):
            path, spares = self._path(key), self._spares_of(key)
            spares.writing = False
            size = path.stat().st_size
            if size < LARGE_BYTES or not spares.has_room(size):
                return False
            spare = self._temporary()
            path.replace(spare)
            spares.files[spare] = size
        return True

    def _begin(self, key: str, small: bool) -> tuple[Path, int]:
        """A file to write an object into, which no reader sees yet, and its descriptor."""
        with self._lock:
            files = {} if small else self._spares_of(key).files
            spare = files.popitem()[0] if files else None
        if spare is not None:
            with contextlib.suppress(FileNotFoundError):  # somebody has cleaned up the folder
                os.utime(spare)  # in use again
                return spare, os.open(spare, os.O_WRONLY | os.O_CLOEXEC)
        path = self._temporary()
        return path, _create(path)

    def _path(self, key: str) -> Path:
        return self.root / key

    def _temporary(self) -> Path:
        return self.root / temporary_name(self._life, next(self._names))

    def _write(self, key: str, parts: Iterable[Buffer], *, small: bool = False) -> tuple[Path, int]:
        """Write an object into a file that no reader sees; returns it and its size in bytes."""
        size = 0
        with self._writing(key):
            temporary, descriptor = self._begin(key, small)
        try:
            try:
                for part in parts:  # which may raise errors of its own
                    with self._writing(key):
                        size += _write_all(descriptor, part)
                with self._writing(key):
                    os.ftruncate(descriptor, size)  # a file that is written over may have been longer
                if size >= LARGE_BYTES:
                    with self._lock:
                        self._spares_of(key).count(size)
            finally:
                os.close(descriptor)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        return temporary, size

    @contextlib.contextmanager
    def _writing(self, key: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise _unavailable(
                f"{str(self._path(key))!r} cannot be written: {error.strerror or error}. Nothing of it is visible to readers.",
                error,
            ) from error

    def _missing(self, key: str) -> ObjectNotFoundError:
        return ObjectNotFoundError(f"there is no object {key!r} in {self.uri}")


class FileReader:
    """An open file; see :class:`._store.ObjectReader`."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor
        self.size = os.fstat(descriptor).st_size

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from ``offset``; see :meth:`._store.ObjectReader.read_into`."""
        done = 0
        while done < len(buffer):
            try:
                count = os.preadv(self._descriptor, [buffer[done:]], offset + done)
            except OSError as error:
                raise _unreadable(self._path, error) from error
            if count == 0:
                raise CorruptedObjectError(
                    f"{str(self._path)!r} is truncated: it has {self.size} bytes, and bytes {offset} to "
                    f"{offset + len(buffer)} were asked for"
                )
            done += count

    def close(self) -> None:
        """Close the file; repeatable."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@contextlib.contextmanager
def _named(what: str) -> Iterator[None]:
    """Give the system's errors the name that a store's have, and say what they mean."""
    try:
        yield
    except OSError as error:
        raise _unavailable(
            f"{what}: {error.strerror or error}. See that this user may read and write the run's folder, and that the file "
            "system is there and has room.",
            error,
        ) from error


def _unreadable(path: Path, error: OSError) -> StoreUnavailableError:
    return _unavailable(
        f"{str(path)!r} cannot be read: {error.strerror or error}. See that this user may, and that the file system is there.",
        error,
    )


def _unavailable(message: str, error: OSError) -> StoreUnavailableError:
    return StoreUnavailableError(message, lasting=error.errno not in _PASSING)


def _folder(uri: str) -> Path:
    if "://" not in uri:
        return Path(uri).expanduser().absolute()
    parsed = urlparse(uri)
    if parsed.netloc not in {"", "localhost"} or not parsed.path:
        raise ConfigurationError(
            f"{uri!r} names the host {parsed.netloc!r}; a folder is written file:///absolute/path, with three slashes"
        )
    return Path(unquote(parsed.path))


def _create(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    return _in_its_folder(path, lambda: os.open(path, flags, 0o644))


def _in_its_folder(path: Path, act: Callable[[], T]) -> T:
    """Do something that needs the folder of ``path``: another replica removes it when its last object goes."""
    for _ in range(100):
        try:
            return act()
        except FileNotFoundError:
            path.parent.mkdir(parents=True, exist_ok=True)
    return act()


def _write_all(descriptor: int, part: Buffer) -> int:
    view = memoryview(part).cast("B")
    size = len(view)
    while view:
        view = view[os.write(descriptor, view) :]
    return size

"""Files below a run's folder, reached without following links.

So nothing outside is ever read, written or deleted.

The run's folder itself may be reached through links. Below it every folder must be a real folder,
and every object a regular file: each one is opened relative to the descriptor of its parent folder,
with ``O_NOFOLLOW``.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..._errors import ConfigurationError, CorruptedObjectError, StoreUnavailableError
from ..._host import host_id, host_name, is_gone
from .._api import ObjectReader, is_key

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
"""How a folder is opened; only the run's own may be reached through links."""
# Without O_NONBLOCK, opening a named pipe would wait for a writer.
_NO_LINK = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}
# Errors of network file systems while their server is away, and errors that are over when a
# resource is released.
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
    errno.EAGAIN,
    errno.EBUSY,
    errno.ENOLCK,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    # Linux has it, macOS has not.
    getattr(errno, "EREMOTEIO", errno.EIO),
}

FULL = {errno.ENOSPC, errno.EDQUOT}
"""Errors of a file system that is full, or in which this user's quota is used up."""

# Faults that a person who reads the log can correct while the run waits, and how.
_REMEDIES = dict.fromkeys(FULL, "The disk is full, or this user's quota is used up: make room.") | {
    errno.EROFS: "The file system is read-only: make it writable again.",
    errno.EFBIG: (
        "The file would be larger than the file system allows, or than this process may write "
        "(ulimit -f): raise that limit. More fragments make smaller files."
    ),
}


def split(key: str) -> list[str]:
    """The names of the folders and of the file that a key consists of.

    Raises:
        ConfigurationError: The key would lead out of the run's folder, or to a file that cannot be
            the run's.
    """
    names = key.split("/")
    if not is_key(key):
        raise ConfigurationError(
            f"{key!r} is not a key: the parts between slashes must be printable names that do not "
            "begin with a dot"
        )
    return names


@contextlib.contextmanager
def opened_below(root: int, names: Sequence[str], *, make: bool = False) -> Iterator[int]:
    """The descriptor of a folder below another one, reached without following links.

    ``make`` creates missing folders.
    """
    current = root
    try:
        for name in names:
            try:
                child = _open_folder(current, name)
            except FileNotFoundError:
                if not make:
                    raise
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, dir_fd=current)
                    sync_folder(current)
                child = _open_folder(current, name)
            if current != root:
                os.close(current)
            current = child
        yield current
    finally:
        if current != root:
            os.close(current)


def _open_folder(folder: int, name: str) -> int:
    try:
        return os.open(name, FOLDER | os.O_NOFOLLOW, dir_fd=folder)
    except OSError as error:
        if error.errno in {errno.ELOOP, errno.ENOTDIR} and stat.S_ISLNK(
            _look(folder, name).st_mode
        ):
            message = (
                f"the folder {name!r} in it is a symbolic link, and only the run's own folder may "
                "be reached through one"
            )
            raise OSError(errno.ELOOP, message) from error
        raise


def _look(folder: int, name: str) -> os.stat_result:
    return os.stat(name, dir_fd=folder, follow_symlinks=False)


def open_to_read(folder: int, name: str, path: str) -> FileReader:
    """Open an object.

    Raises:
        CorruptedObjectError: It is not a regular file. It was not opened, since that alone has
            effects on some devices.
    """
    _check_regular(_look(folder, name), path)
    descriptor = os.open(name, os.O_RDONLY | _NO_LINK, dir_fd=folder)
    try:
        _check_regular(os.fstat(descriptor), path)  # the file may have been replaced since
        return FileReader(path, descriptor)
    except BaseException:
        os.close(descriptor)
        raise


def _check_regular(status: os.stat_result, path: str) -> None:
    kind = _kind(status)
    if kind is not None:
        raise CorruptedObjectError(
            f"{path!r} is {kind}, and the objects of a run are regular files: it was not read. "
            "Remove what does not belong to the run, or use another folder."
        )


def _kind(status: os.stat_result) -> str | None:
    """Return what is in the place of an object ("a named pipe"); None for a regular file."""
    return _KINDS.get(stat.S_IFMT(status.st_mode))


def check_replaceable(folder: int, name: str) -> None:
    """Refuse to replace or remove anything but a regular file, since it cannot be the run's.

    Raises:
        OSError: There is a link, a pipe, a socket, a device or a folder of this name.
    """
    with contextlib.suppress(FileNotFoundError):
        kind = _kind(_look(folder, name))
        if kind is not None:
            raise OSError(
                errno.EINVAL,
                f"it is {kind}, and the objects of a run are regular files. Remove what does not "
                "belong to the run, or use another folder",
            )


def make_folders(path: Path, made: list[Path]) -> None:
    """Make a folder and those above it if they are missing.

    Each one is put into ``made``, so that the deepest comes first.
    """
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        with contextlib.suppress(FileExistsError):  # another replica was quicker
            folder.mkdir()
            made.insert(0, folder)
    path.mkdir(exist_ok=True)  # raises an error if the path is not a folder


def remove_folders(folders: list[Path]) -> None:
    """Remove folders, the deepest one first, and stop at the first one that is not empty."""
    with contextlib.suppress(OSError):
        for folder in folders:
            folder.rmdir()


def create_file(folder: int, name: str) -> int:
    """The descriptor of a new file to write to; never one that existed before."""
    return os.open(
        name,
        os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC,
        0o644,
        dir_fd=folder,
    )


def open_to_write_over(folder: int, name: str) -> int | None:
    """Open an old file to write over it.

    Returns its descriptor, or None if that is not allowed (:func:`is_ours_alone`).

    Otherwise, a backup that was made by hard links would change. The check is made on the open
    file, so that it cannot be replaced by another one after the check.
    """
    try:
        descriptor = os.open(name, os.O_WRONLY | _NO_LINK, dir_fd=folder)
    except OSError:
        return None
    if is_ours_alone(os.fstat(descriptor), os.fstat(folder)):
        return descriptor
    os.close(descriptor)
    return None


def is_ours_alone(status: os.stat_result, folder: os.stat_result) -> bool:
    """Say whether a file may be written over.

    That is a regular file of this user, with only one name, on its folder's file system.
    """
    return (
        stat.S_ISREG(status.st_mode)
        and status.st_nlink == 1
        and status.st_uid == os.geteuid()
        and status.st_dev == folder.st_dev
    )


def keep_aside(root: int, folder: int, name: str, spare: str) -> None:
    """Give an object's file a name that no reader looks for."""
    os.replace(name, spare, src_dir_fd=folder, dst_dir_fd=root)


def rename(temporary: str, name: str, root: int, folder: int) -> None:
    """Give an object its name; replaces the object that had this name before."""
    check_replaceable(folder, name)
    os.replace(temporary, name, src_dir_fd=root, dst_dir_fd=folder)


def link(temporary: str, name: str, root: int, folder: int) -> None:
    """Give an object its name, unless it is taken."""
    os.link(temporary, name, src_dir_fd=root, dst_dir_fd=folder, follow_symlinks=False)


def unlink(root: int, name: str) -> None:
    """Remove a temporary file, if it is still there."""
    with contextlib.suppress(OSError):  # it was renamed, or another process has removed it
        os.unlink(name, dir_fd=root)


def remove_empty(root: int, folders: list[str]) -> None:
    """Remove nested folders that are empty, beginning with the innermost."""
    with contextlib.suppress(OSError):  # not empty, or already gone
        for count in range(len(folders) - 1, -1, -1):
            with opened_below(root, folders[:count]) as parent:
                os.rmdir(folders[count], dir_fd=parent)


def sync_folder(folder: int) -> None:
    """Make sure that the names in a folder survive a power cut, if the file system supports it."""
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in {
            errno.EINVAL,
            errno.EBADF,
            errno.ENOSYS,
            errno.EOPNOTSUPP,
            errno.EACCES,
        }:
            raise


def sizes(folder: int, folders: list[str]) -> Iterator[tuple[str, int]]:
    """Names and sizes in bytes of the objects in a folder.

    The names of its subfolders are appended to ``folders``.

    Links, pipes, sockets and devices are left out. So are files whose names begin with a dot (they
    are our temporary files, or those of the system: ``.nfs...``, ``.snapshot``, ``.DS_Store``) or
    are not printable text.
    """
    with os.scandir(folder) as entries:
        for entry in entries:
            if not is_key(entry.name) or entry.name == "lost+found":
                continue
            if entry.is_dir(follow_symlinks=False):
                folders.append(entry.name)
            elif entry.is_file(follow_symlinks=False):
                with contextlib.suppress(FileNotFoundError):
                    yield entry.name, entry.stat(follow_symlinks=False).st_size


def unavailable(message: str, error: OSError) -> StoreUnavailableError:
    """The error of the store for an error of the system."""
    remedy = _REMEDIES.get(error.errno or 0)
    if remedy is not None:
        message = f"{message.rstrip('.')}. {remedy}"
    return StoreUnavailableError(message, lasting=remedy is None and error.errno not in _PASSING)


def unreadable(path: str, error: OSError) -> StoreUnavailableError:
    """The error for an object that is there and cannot be read."""
    return unavailable(
        f"{path!r} cannot be read: {error.strerror or error}. Check that this user may read it, "
        "and that the file system is mounted.",
        error,
    )


class FileReader(ObjectReader):
    """An open file; see :class:`._api.ObjectReader`."""

    def __init__(self, path: str, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor
        self.size = os.fstat(descriptor).st_size

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from ``offset``; see :meth:`._api.ObjectReader.read_into`."""
        done = 0
        while done < len(buffer):
            try:
                rest = buffer[done:] if done else buffer
                count = os.preadv(self._descriptor, [rest], offset + done)
            except OSError as error:
                raise unreadable(self._path, error) from error
            if count == 0:
                raise CorruptedObjectError(
                    f"{self._path!r} is truncated: it has {self.size} bytes, and bytes {offset} to "
                    f"{offset + len(buffer)} are needed"
                )
            done += count

    def close(self) -> None:
        """Close the file; repeatable."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


LARGE_BYTES = 2**16
"""The file of a deleted object is kept for reuse if it has at least this size."""

_NAME = re.compile(r"\.tmp-([0-9]+)-([0-9a-f]{8})-[0-9]+-([0-9a-f]{12})")
_MOST_SPARES = 8
_OLD_SECONDS = 3600.0

# The stores of this process, by name. A store that was dropped without being closed counts as gone.
_stores: weakref.WeakValueDictionary[str, object] = weakref.WeakValueDictionary()


def new_store_name(store: object) -> str:
    """A name for a store object of this process.

    It marks the store's files as in use for as long as the object exists.
    """
    name = secrets.token_hex(4)
    _stores[name] = store
    return name


def temporary_name(store_name: str, number: int) -> str:
    """Return the name of a temporary file: it says which process, store object and host own it."""
    return f".tmp-{os.getpid()}-{store_name}-{number}-{host_id()}"


def remove_leftovers(root: Path) -> None:
    """Remove the temporary files of processes that are gone.

    Other processes may do so at the same time.

    A file that cannot be removed stays, and so does anything that is not a regular file with a name
    of ours.

    Nothing is known of the processes of other machines, so their files are removed when they have
    not been written to for an hour, by the clock of the file system (the last change to the folder
    itself). If such a process has only slept for so long, its file is missing when it is to become
    an object: that write fails, and can be repeated.
    """
    with contextlib.suppress(OSError), os.scandir(root) as entries:
        now = root.stat().st_mtime
        for entry in entries:
            match = _NAME.fullmatch(entry.name)
            if match is not None:
                with contextlib.suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    if not stat.S_ISREG(status.st_mode):
                        continue
                    gone = _gone(*match.groups())
                    if now - status.st_mtime > _OLD_SECONDS if gone is None else gone:
                        Path(entry.path).unlink()


class Spares:
    """The files of one top folder that are kept for reuse, with their sizes in bytes.

    Together they have about as many bytes as were written between two deletions: those of other
    ranks differ a little in size.
    """

    def __init__(self) -> None:
        self.files: dict[str, int] = {}
        self.writing = True
        self._written = self._written_before = 0

    def count(self, size: int) -> None:
        """Count bytes that were written. The first ones after a deletion begin a new count.

        The count before it is kept, too, since fragments differ in size.
        """
        if not self.writing:
            self._written, self._written_before, self.writing = 0, self._written, True
        self._written += size

    def has_room(self, size: int) -> bool:
        """Say whether a file of so many bytes is to be kept."""
        most = max(self._written, self._written_before) * 9 // 8
        return len(self.files) < _MOST_SPARES and sum(self.files.values()) + size <= most


def _gone(pid: str, store_name: str, made_on: str) -> bool | None:
    """Say whether the process that made a temporary file is gone; None if that cannot be known.

    If another process has got its id since, the file stays. Files that bear the id of this process
    are judged by the name of their store, since in a container the process before this one often
    had the very same id.
    """
    if made_on != host_id():
        return None
    if int(pid) == os.getpid():
        return store_name not in _stores
    return is_gone(int(pid), host_name())

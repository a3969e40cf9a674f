"""Files below a run's folder, reached without following links, so that nothing outside is ever read, written or deleted.

The run's folder itself may be reached through links. Below it every folder must be a real one, and every object a regular
file: each step is taken from the descriptor of the folder before, with ``O_NOFOLLOW``.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from typing import TYPE_CHECKING, Self

from ..._errors import ConfigurationError, CorruptedObjectError, StoreUnavailableError
from .._api import is_key

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path
    from types import TracebackType

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# Opening a named pipe waits for a writer, unless it is told not to.
_NO_LINK = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}
# What network file systems say while their server is away, and what passes when somebody lets go of something.
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
"""What a file system says that has no room, or no more for this user."""

# What somebody who reads the log can mend while the run waits.
_TO_MEND = dict.fromkeys(FULL, "The disk is full, or this user's quota is used up: make room.") | {
    errno.EROFS: "The file system is read-only: make it writable again.",
    errno.EFBIG: (
        "The file would be larger than the file system allows, or than this process may write (ulimit -f): raise that "
        "limit. More fragments make smaller files."
    ),
}


def split(key: str) -> list[str]:
    """The folders and the file that a key names.

    Raises:
        ConfigurationError: It would lead out of the run's folder, or to a file that is none of the run's.
    """
    names = key.split("/")
    if not is_key(key):
        raise ConfigurationError(
            f"{key!r} is not a key: its parts must be names that do not begin with a dot"
        )
    return names


@contextlib.contextmanager
def opened_folder(path: Path) -> Iterator[int]:
    """The descriptor of the run's folder, which may be reached through links."""
    descriptor = os.open(path, _FOLDER)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def opened_below(root: int, names: Sequence[str], *, make: bool = False) -> Iterator[int]:
    """The descriptor of a folder below another one; no step to it is a link. With ``make`` it is made where it is missing."""
    here = os.dup(root)
    try:
        for name in names:
            try:
                below = _step(here, name)
            except FileNotFoundError:
                if not make:
                    raise
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, dir_fd=here)
                    sync_folder(here)
                below = _step(here, name)
            os.close(here)
            here = below
        yield here
    finally:
        os.close(here)


def _step(folder: int, name: str) -> int:
    try:
        return os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)
    except OSError as error:
        if error.errno in {errno.ELOOP, errno.ENOTDIR} and stat.S_ISLNK(
            _look(folder, name).st_mode
        ):
            text = f"the folder {name!r} in it is a symbolic link, and only the run's own folder may be reached through one"
            raise OSError(errno.ELOOP, text) from error
        raise


def _look(folder: int, name: str) -> os.stat_result:
    return os.stat(name, dir_fd=folder, follow_symlinks=False)


def is_there(folder: int, name: str) -> bool:
    """Whether a folder has a file, link or folder of this name."""
    try:
        _look(folder, name)
    except FileNotFoundError:
        return False
    return True


def open_to_read(folder: int, name: str, path: Path) -> FileReader:
    """Open an object.

    Raises:
        CorruptedObjectError: It is not a regular file. It is not opened: that alone has effects on some devices.
    """
    _check_regular(_look(folder, name), path)
    descriptor = os.open(name, os.O_RDONLY | _NO_LINK, dir_fd=folder)
    try:
        _check_regular(os.fstat(descriptor), path)  # it may be another one by now
        return FileReader(path, descriptor)
    except BaseException:
        os.close(descriptor)
        raise


def _check_regular(status: os.stat_result, path: Path) -> None:
    kind = _kind(status)
    if kind is not None:
        raise CorruptedObjectError(
            f"{str(path)!r} is {kind}, and the objects of a run are regular files: it is not read. Remove what is not the "
            "run's, or name another folder."
        )


def _kind(status: os.stat_result) -> str | None:
    """What lies in the place of an object, where that is no regular file."""
    return _KINDS.get(stat.S_IFMT(status.st_mode))


def check_replaceable(folder: int, name: str) -> None:
    """Refuse to put an object in the place of what is not an object, or to remove that: it is somebody else's.

    Raises:
        OSError: It is a link, a pipe, a socket, a device or a folder.
    """
    with contextlib.suppress(FileNotFoundError):
        kind = _kind(_look(folder, name))
        if kind is not None:
            raise OSError(
                errno.EINVAL,
                f"it is {kind}, and the objects of a run are regular files. Remove what is not the run's, or name another "
                "folder",
            )


def make_folders(path: Path) -> list[Path]:
    """Make a folder, and those above it, where they are missing. Returns those that were made, the deepest one first.

    If that fails, those that were made are gone again.
    """
    made: list[Path] = []
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        for folder in reversed(missing):
            try:
                folder.mkdir()
            except FileExistsError:  # another replica was quicker
                continue
            made.insert(0, folder)
        path.mkdir(exist_ok=True)  # it must be a folder
    except BaseException:
        remove_folders(made)
        raise
    return made


def remove_folders(folders: list[Path]) -> None:
    """Remove folders, the deepest one first, up to one that somebody uses."""
    with contextlib.suppress(OSError):
        for folder in folders:
            folder.rmdir()


def create_file(folder: int, name: str) -> int:
    """A new file to write to; never one that was there."""
    return os.open(
        name,
        os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC,
        0o644,
        dir_fd=folder,
    )


def open_to_write_over(folder: int, name: str) -> int | None:
    """An old file to write over, or None if that could be seen by others: it must be ours, regular, and have this one name.

    What is checked is what is open, so that nobody can put another file in its place meanwhile. Somebody's backup by hard
    links would change under its owner otherwise.
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
    """Whether a file may be written over: regular, of this user, with no other name, on the file system of its folder."""
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
    """Give an object its name; an object that had it before is gone."""
    check_replaceable(folder, name)
    os.replace(temporary, name, src_dir_fd=root, dst_dir_fd=folder)


def link(temporary: str, name: str, root: int, folder: int) -> None:
    """Give an object its name, unless something has it."""
    os.link(temporary, name, src_dir_fd=root, dst_dir_fd=folder, follow_symlinks=False)


def unlink(root: int, name: str) -> None:
    """Remove a temporary file, if it is still there."""
    with contextlib.suppress(OSError):  # it was renamed, or others have cleaned up
        os.unlink(name, dir_fd=root)


def remove_empty(root: int, folders: list[str]) -> None:
    """Remove those of the folders, one in the other, that hold nothing."""
    with contextlib.suppress(OSError):  # not empty, or already gone
        for count in range(len(folders) - 1, -1, -1):
            with opened_below(root, folders[:count]) as parent:
                os.rmdir(folders[count], dir_fd=parent)


def sync_folder(folder: int) -> None:
    """See to it that the names in a folder outlast a power cut, on file systems that can do that."""
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
    """Names and sizes in bytes of the objects in a folder; its folders are added to a list.

    Links, pipes, sockets and devices are no objects. Nor is what has a name that begins with a dot (it is ours, or the file
    system's: ``.nfs...``, ``.snapshot``, ``.DS_Store``) or that is not printable text.
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
    """What the system refused, as the error of a store."""
    to_mend = _TO_MEND.get(error.errno or 0)
    if to_mend is not None:
        message = f"{message.rstrip('.')}. {to_mend}"
    return StoreUnavailableError(message, lasting=to_mend is None and error.errno not in _PASSING)


def unreadable(path: Path, error: OSError) -> StoreUnavailableError:
    """An object that is there and cannot be read."""
    return unavailable(
        f"{str(path)!r} cannot be read: {error.strerror or error}. See that this user may, and that the file system is there.",
        error,
    )


class FileReader:
    """An open file; see :class:`._api.ObjectReader`."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor
        self.size = os.fstat(descriptor).st_size

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from ``offset``; see :meth:`._api.ObjectReader.read_into`."""
        done = 0
        while done < len(buffer):
            try:
                count = os.preadv(self._descriptor, [buffer[done:]], offset + done)
            except OSError as error:
                raise unreadable(self._path, error) from error
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
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

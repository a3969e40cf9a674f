"""Files of this user, opened without following links, where no other user could have put them.

Everything below a root is reached through this module. A folder that is this user's, and to which
no other user can write, holds only what this user has put there. So it is enough to check each
folder once, the folders above it before that, and every file when it is opened.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import IO, Any

from diloco_protocol import InvalidRequestError

_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def check_own_folder(path: Path) -> None:
    """Refuse a folder into which another user could have put something; a missing one is fine.

    Raises:
        InvalidRequestError: It is a link, is not a folder, or belongs to another user, or others
            can write to it; or none of that can be known.
    """
    try:
        status = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return  # missing: the code that uses it says so
    except OSError as error:
        raise _refused(path, f"cannot be looked at ({error.strerror})") from error
    _check_folder(path, status)


def check_root(path: Path) -> None:
    """Refuse a root in which any user can replace what this user has made; it may be a link.

    Raises:
        InvalidRequestError: Says what to do.
    """
    try:
        mode = path.stat().st_mode
    except OSError:
        return  # missing, or not a folder: the code that uses it says so
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise InvalidRequestError(
            f"everybody can replace what is in root={str(path)!r}: choose another folder, or take "
            f"that right away (chmod o-w {path})"
        )


def open_own(path: Path, flags: int, *, fifo: bool = False) -> int:
    """Open a file of this user's in a folder of this user's, and return its descriptor.

    Other programs do not inherit the descriptor.

    Args:
        path: The file.
        flags: As for ``os.open``. A file that is created is readable by this user only.
        fifo: Whether it is a FIFO; opening and writing it do not wait for its reader.

    Raises:
        InvalidRequestError: The file or its folder is a link, belongs to another user, is closed,
            or is not of the expected kind.
        OSError: It is missing, or cannot be opened.
    """
    folder = _open_folder(path.parent)
    try:
        # Opened without waiting, since what should be a file could be a FIFO without a writer.
        descriptor = os.open(
            path.name,
            flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK,
            mode=0o600,
            dir_fd=folder,
        )
    except OSError as error:
        if error.errno in {errno.ELOOP, errno.EMLINK}:
            raise _refused(path, "is a link") from error
        if error.errno == errno.EACCES:
            raise _refused(path, "is closed to its owner") from error
        if (
            error.errno in {errno.EISDIR, errno.ENXIO} and not fifo
        ):  # a folder; a socket, or a FIFO without a reader
            raise _refused(path, "is no file") from error
        raise
    finally:
        os.close(folder)
    try:
        status = os.fstat(descriptor)
        if not (stat.S_ISFIFO if fifo else stat.S_ISREG)(status.st_mode):
            raise _refused(path, f"is no {'FIFO' if fifo else 'file'}")
        if status.st_uid != os.geteuid():
            raise _refused(path, _whose(status))
        os.set_blocking(descriptor, not fifo)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_own_stream(path: Path, mode: str) -> IO[Any]:
    """Open such a file as a stream of bytes: to read (``"rb"``) or to append (``"ab"``)."""
    flags = {"rb": os.O_RDONLY, "ab": os.O_WRONLY | os.O_CREAT | os.O_APPEND}[mode]
    return os.fdopen(open_own(path, flags), mode)


def _open_folder(path: Path) -> int:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if path.is_symlink():
            raise _refused(path, "is a link") from error
        if error.errno == errno.EACCES:
            raise _refused(path, "is closed to its owner") from error
        raise
    try:
        _check_folder(path, os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check_folder(path: Path, status: os.stat_result) -> None:
    if stat.S_ISLNK(status.st_mode):
        raise _refused(path, "is a link")
    if not stat.S_ISDIR(status.st_mode):
        raise _refused(path, "is no folder")
    if status.st_uid != os.geteuid():
        raise _refused(path, _whose(status))
    if status.st_mode & _WRITABLE_BY_OTHERS:
        raise _refused(path, "can be written to by others", f" (or chmod go-w {path})")


def _whose(status: os.stat_result) -> str:
    return f"belongs to the user with the id {status.st_uid}, and this one has {os.geteuid()}"


def _refused(path: Path, why: str, advice: str = "") -> InvalidRequestError:
    return InvalidRequestError(
        f"{path} {why}, so nothing is read, written or ended there: use a root of your own{advice}"
    )

"""Files of this user, opened without following links, where no other user could have put them.

Everything below a root is reached through this module. A folder that is this user's, and to which
no other user can write, holds only what this user has put there. So it is enough to check each
folder once, the folders above it before that, and every file when it is opened.

Small files are whole or absent: atomic writes, create-once writes, and locks. A lock is released
when its holder dies.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from diloco_protocol import BackendError, InvalidRequestError
from diloco_protocol.backend import RECORD_BYTES, is_shortage, read_bounded, redact_text

_TAIL_BYTES = 1 << 16


class DamagedFileError(BackendError, ValueError):
    """The error of a file below the root with wrong content; says which, and what is wrong."""


@contextlib.contextmanager
def system_errors() -> Iterator[None]:
    """Turn what the operating system refuses into an error of the protocol.

    Raises:
        BackendError: In place of :class:`OSError` and :class:`RecursionError`; retryable if the
            system is only short of something.
    """
    try:
        yield
    except (OSError, RecursionError) as error:  # a replica may have put folders into folders
        short = isinstance(error, OSError) and is_shortage(error)
        raise BackendError(f"the operating system refused it: {error}", retryable=short) from error


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Report whatever does not fit while a file's content is parsed as damage of that file.

    Raises:
        DamagedFileError: In place of the errors of Python.
    """
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise DamagedFileError(
            f"{path} does not hold what is written there: {type(error).__name__}: {error}"
        ) from error


@contextlib.contextmanager
def _temporary(path: Path, text: str) -> Iterator[Path]:
    # In the same folder, because rename and link are atomic only within one file system.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with os.fdopen(open_own(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as stream:
            stream.write(text.encode())
        yield temporary
    finally:  # or they would fill up a disk that is full
        with contextlib.suppress(OSError):
            temporary.unlink()


def write_json(path: Path, value: Any) -> None:
    """Replace ``path`` by the JSON of ``value``; a reader sees the old or the new, never a part."""
    write_text(path, json.dumps(value))


def write_text(path: Path, text: str) -> None:
    """Replace ``path`` by ``text``; a reader sees the old content or the new, never a part."""
    with _temporary(path, text) as temporary:
        temporary.replace(path)


def create_json(path: Path, value: Any) -> bool:
    """Write ``path`` only if it does not exist; the first writer wins.

    Returns:
        True if this call created the file, False if it was already there.
    """
    with _temporary(path, json.dumps(value)) as temporary:
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
    return True


def read_json(path: Path) -> Any | None:
    """Return the JSON in ``path``, or None if there is no such file.

    Raises:
        DamagedFileError: The file is not JSON, or null. Files written here never are, so another
            program has damaged it.
        BackendError: It cannot be read.
    """
    data = read_bytes(path)
    if data is None:
        return None
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DamagedFileError(f"{path} is not JSON: {error}") from error
    if value is None:  # null must not be taken for a missing file
        raise DamagedFileError(f"{path} does not hold what is written there: it is null")
    return value


def read_bytes(path: Path, most: int = RECORD_BYTES) -> bytes | None:
    """Return the content of ``path``, or None if there is no such file.

    Raises:
        DamagedFileError: It is larger than ``most`` bytes.
        InvalidRequestError: It is a link, belongs to another user, is closed to its owner, or is
            not a file.
        BackendError: It cannot be read.
    """
    try:
        with open_own_stream(path, "rb") as stream, reading(path):
            return read_bounded(stream, most, "it")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise BackendError(
            f"{path} cannot be read: {error}", retryable=is_shortage(error)
        ) from error


def read_tail(path: Path, most: int = 2000) -> str:
    """Return the last ``most`` characters of a log of ours without secrets; "" if there is none."""
    try:
        with open_own_stream(path, "rb") as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - _TAIL_BYTES))
            text = stream.read(_TAIL_BYTES).decode(errors="replace")
    except FileNotFoundError:
        return ""
    # Secrets are redacted before the text is cut: the sign of one may be before the part that is
    # shown.
    return redact_text(text)[-most:].strip()


def say(text: str) -> None:
    """Write into the log of the supervisor, its standard error; a full disk must not stop it."""
    with contextlib.suppress(OSError):
        os.write(2, text.encode(errors="backslashreplace"))


def open_lock(path: Path) -> int:
    """Open (and create) a lock file; return its descriptor, which other programs do not inherit."""
    return open_own(path, os.O_RDWR | os.O_CREAT)


def try_lock(descriptor: int, *, wait: float = 0.0) -> bool:
    """Take the exclusive lock, trying for ``wait`` seconds; return whether it was taken.

    The lock belongs to the open file, so processes that share the descriptor by fork hold it
    together, and it is released when the last of them is gone, however it ended.
    """
    deadline = time.monotonic() + wait
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.01)
        else:
            return True


def is_locked(path: Path) -> bool:
    """Say whether some process holds the exclusive lock of ``path`` at this moment."""
    try:
        descriptor = open_own(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        # Shared, so that two observers do not take each other for the holder.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        with contextlib.suppress(OSError):
            os.close(descriptor)


def check_own_folder(path: Path) -> None:
    """Refuse a folder into which another user could have put something; a missing one is fine.

    Raises:
        InvalidRequestError: It is a link, is not a folder, or belongs to another user, or others
            can write to it; or none of that can be known.
    """
    try:
        _check(path, "folder", path.lstat())
    except (FileNotFoundError, NotADirectoryError):
        return  # missing: the code that uses it says so
    except OSError as error:
        raise _refused(path, "folder") from error


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
    kind = "FIFO" if fifo else "file"
    folder = _open_folder(path.parent)
    try:
        # Opened without waiting, since what should be a file could be a FIFO without a writer.
        more = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        descriptor = os.open(path.name, flags | more, mode=0o600, dir_fd=folder)
    except OSError as error:
        # A folder, a socket, or a FIFO without a reader
        other_kind = error.errno in {errno.EISDIR, errno.ENXIO} and not fifo
        if other_kind or error.errno in {errno.ELOOP, errno.EMLINK, errno.EACCES}:
            raise _refused(path, kind) from error
        raise
    finally:
        os.close(folder)
    return _checked(path, kind, descriptor)


def open_own_stream(path: Path, mode: str) -> IO[Any]:
    """Open such a file as a stream of bytes: to read (``"rb"``) or to append (``"ab"``)."""
    flags = {"rb": os.O_RDONLY, "ab": os.O_WRONLY | os.O_CREAT | os.O_APPEND}[mode]
    return os.fdopen(open_own(path, flags), mode)


def _open_folder(path: Path) -> int:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if path.is_symlink() or error.errno == errno.EACCES:
            raise _refused(path, "folder") from error
        raise
    return _checked(path, "folder", descriptor)


def _checked(path: Path, kind: str, descriptor: int) -> int:
    """Return the descriptor of what was opened, or close it if it is refused."""
    try:
        _check(path, kind, os.fstat(descriptor))
        os.set_blocking(descriptor, kind != "FIFO")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check(path: Path, kind: str, status: os.stat_result) -> None:
    mode = status.st_mode
    right_kind = {"folder": stat.S_ISDIR, "file": stat.S_ISREG, "FIFO": stat.S_ISFIFO}[kind](mode)
    closed = kind != "folder" or not mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not right_kind or status.st_uid != os.geteuid() or not closed:
        raise _refused(path, kind)


def _refused(path: Path, kind: str) -> InvalidRequestError:
    facts = ""
    with contextlib.suppress(OSError):
        status = path.lstat()
        facts = f" (it is {stat.filemode(status.st_mode)} of the user {status.st_uid})"
    return InvalidRequestError(
        f"{path} is a link, or not a {kind} that the user {os.geteuid()} can open and no other can "
        f"write to{facts}, so nothing is read, written or ended there: use a root of your own, or "
        f"mend it (chmod u+rw,go-w {path})"
    )

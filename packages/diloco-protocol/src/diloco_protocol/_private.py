"""Files that can be trusted because only this user can have written them."""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING, BinaryIO

from ._errors import InvalidRequestError

if TYPE_CHECKING:
    from pathlib import Path


def make_private_folder(path: Path) -> None:
    """Make a folder that only this user can enter, and missing folders above it.

    A folder that exists and does not belong to this user alone is refused.

    Raises:
        InvalidRequestError: The folder is refused, as by :func:`check_private_folder`.
        OSError: The folder cannot be made.
    """
    # One by one: parents=True would give those above the permissions of the umask, and everyone who
    # may write there could replace what is below.
    for folder in (*reversed(path.parents), path):
        folder.mkdir(mode=0o700, exist_ok=True)
    check_private_folder(path)


def check_private_folder(path: Path) -> None:
    """Refuse a folder in which another user can write.

    A path that does not exist, or is not a folder, is not refused: its user will notice.

    Raises:
        InvalidRequestError: The folder belongs to another user, or others can write to it; the
            error says what to do.
    """
    try:
        status = path.stat()
    except OSError:
        return
    if not stat.S_ISDIR(status.st_mode):
        return
    if status.st_uid != os.geteuid():
        raise InvalidRequestError(
            f"the folder {path} belongs to the user with the id {status.st_uid}, and this one has "
            f"{os.geteuid()}: what is written there is believed, so give a folder of your own, "
            "such as a new one in it"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise InvalidRequestError(
            f"others can write to the folder {path}, and what is written there is believed: take "
            f"that right away (chmod go-w {path}), or give another folder"
        )


def write_private(path: Path, text: str) -> None:
    """Write a new file that only this user can read.

    Raises:
        OSError: The file exists, or cannot be written.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o600), "w", encoding="utf-8") as file:
        file.write(text)


def open_private(path: Path) -> BinaryIO:
    """Open a file that belongs to this user, to read it.

    Raises:
        InvalidRequestError: The path is a link or not a file, or the file belongs to another user.
        OSError: The file is missing or cannot be read.
    """
    try:
        # Without blocking, since it could be a FIFO to which no process writes.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno not in {errno.ELOOP, errno.EMLINK}:
            raise
        raise InvalidRequestError(f"{path} is a link, and is not followed: remove it") from error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        os.close(descriptor)
        raise InvalidRequestError(
            f"{path} is not a file of the user with the id {os.geteuid()}, and is not read: remove "
            "it"
        )
    return os.fdopen(descriptor, "rb")

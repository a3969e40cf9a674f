"""Files that are believed because only this user can have written them."""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING

from ._bounds import read_bounded
from ._errors import InvalidRequestError

if TYPE_CHECKING:
    from pathlib import Path


def make_private_folder(path: Path) -> None:
    """Make a folder that only this user can enter, and those above it, if missing; refuse one that is not this user's alone.

    Raises:
        InvalidRequestError: As :func:`check_private_folder`.
        OSError: It cannot be made.
    """
    # One by one: parents= would leave those above to the umask, and whoever may write there could
    # replace what is below.
    for folder in (*reversed(path.parents), path):
        folder.mkdir(mode=0o700, exist_ok=True)
    check_private_folder(path)


def check_private_folder(path: Path) -> None:
    """Refuse a folder in which somebody else can write.

    One that does not exist, or is no folder, is left to who uses it.

    Raises:
        InvalidRequestError: It is another user's, or others can write to it; says what to do.
    """
    try:
        found = path.stat()
    except OSError:
        return
    if not stat.S_ISDIR(found.st_mode):
        return
    if found.st_uid != os.geteuid():
        raise InvalidRequestError(
            f"the folder {path} belongs to the user with the id {found.st_uid}, and this one has "
            f"{os.geteuid()}: what is written there is believed, so give a folder of your own, "
            "such as a new one in it"
        )
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise InvalidRequestError(
            f"others can write to the folder {path}, and what is written there is believed: take "
            f"that right away (chmod go-w {path}), or give another folder"
        )


def write_private(path: Path, text: str) -> None:
    """Write a new file that only this user can read.

    Raises:
        OSError: It exists, or cannot be written.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o600), "w", encoding="utf-8") as file:
        file.write(text)


def read_private(path: Path, most: int) -> str:
    """What a file of this user's holds.

    Args:
        path: The file.
        most: The largest size allowed, in bytes.

    Raises:
        InvalidRequestError: It is a link, no file, another user's, or larger.
        OSError: It is missing or cannot be read.
        UnicodeDecodeError: It is not UTF-8.
    """
    try:
        # Without waiting, since it could be a FIFO that nobody writes to.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno not in {errno.ELOOP, errno.EMLINK}:
            raise
        raise InvalidRequestError(f"{path} is a link, and is not followed: remove it") from error
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        os.close(descriptor)
        raise InvalidRequestError(
            f"{path} is not a file of the user with the id {os.geteuid()}, and is not read: remove "
            "it"
        )
    with os.fdopen(descriptor, "rb") as file:
        return read_bounded(file, most, str(path)).decode()

"""Files that programs may have replaced, and files that must not be seen half written."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from pathlib import Path
from typing import BinaryIO


def open_regular(path: Path) -> BinaryIO:
    """Open a file to read it, without waiting: a FIFO could block, and a device never ends.

    Raises:
        FileNotFoundError: there is no file, or it is not a regular file.
        OSError: it cannot be opened; a link never can.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FileNotFoundError(errno.ENOENT, "Not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def replace(path: Path, data: bytes) -> None:
    """Write a file that only its owner can read beside a path, then put it in its place.

    Raises:
        OSError: it cannot be written there, or the path exists and is not a file.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
    descriptor, name = tempfile.mkstemp(prefix=".", dir=path.parent)  # with mode 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise

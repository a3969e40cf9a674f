"""Files where programs may have put something else."""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from pathlib import Path


def open_regular(path: Path) -> BinaryIO:
    """Open a file to read it, without waiting: a FIFO would be for ever, and a device has no end.

    Raises:
        FileNotFoundError: nothing is there, or what is there is no regular file.
        OSError: it cannot be opened, as a link cannot.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FileNotFoundError(errno.ENOENT, "Not a regular file", str(path))
    return os.fdopen(descriptor, "rb")

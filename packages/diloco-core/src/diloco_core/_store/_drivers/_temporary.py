"""The temporary files of a folder store: their names, those kept for reuse, and those that killed processes have left."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import secrets
import socket
import stat
import sys
import uuid
import weakref
from pathlib import Path

LARGE_BYTES = 2**16
"""The file of a deleted object is kept for reuse from this size on."""

_NAME = re.compile(r"\.tmp-([0-9]+)-([0-9a-f]{8})-[0-9]+-([0-9a-f]{12})")
_MOST_SPARES = 8
_OLD_SECONDS = 3600.0

# The stores of this process. One that was dropped without being closed is as good as gone.
_lives: weakref.WeakValueDictionary[str, object] = weakref.WeakValueDictionary()


def new_life(store: object) -> str:
    """A name for a store of this process, under which its files are known for as long as it is there."""
    life = secrets.token_hex(4)
    _lives[life] = store
    return life


def temporary_name(life: str, number: int) -> str:
    """The name of a temporary file: of which process, which store of it, and where."""
    return f".tmp-{os.getpid()}-{life}-{number}-{_place()}"


def remove_leftovers(root: Path) -> None:
    """Remove the temporary files of processes that are gone; others may do so at the same time. What cannot go, stays.

    What is not a regular file with a name that only we give is somebody else's, and stays.

    Of other machines nothing is known, so there it counts that a file has not been written to for an hour, by the clock
    of the file system (the last change to the folder itself). Should its process only have slept so long, it misses the
    file when that is to become an object: the write fails, and can be repeated.
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
    """The files kept of one top folder, with their sizes in bytes: at most as much as was written between two deletions."""

    def __init__(self) -> None:
        self.files: dict[str, int] = {}
        self.writing = True
        self._written = self._before = 0

    def count(self, size: int) -> None:
        """So many bytes were written. The first after a deletion begin a new count; fragments differ, so two are kept."""
        if not self.writing:
            self._written, self._before, self.writing = 0, self._written, True
        self._written += size

    def has_room(self, size: int) -> bool:
        """Whether a file of so many bytes shall be kept."""
        most = max(self._written, self._before)
        return len(self.files) < _MOST_SPARES and sum(self.files.values()) + size <= most


@functools.cache
def _place() -> str:
    """Where a process id means the same process: a host since it was started, and in it a container.

    A host's name alone would not do: containers may share it, and have process ids of their own.
    """
    parts = [socket.gethostname()]
    if sys.platform == "linux":
        try:
            boot, names = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
            parts += [boot.read_text(), str(names.readlink())]
        except OSError:
            parts.append(secrets.token_hex(8))  # nowhere that others know
    else:
        parts.append(f"{uuid.getnode():x}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def _gone(pid: str, life: str, place: str) -> bool | None:
    """Whether the process that a temporary file is of is gone; None where that cannot be known.

    Where its id was given to another process, it counts as there, and the file stays. But this process knows its own files:
    in a container, the one before it often had the very same id.
    """
    if place != _place():
        return None
    if int(pid) == os.getpid():
        return life not in _lives
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:  # another user's
        return False
    return False

"""The temporary files of a folder store: how they are named, which are kept for reuse, and which are left over.

A file is left over when its process was killed.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
import weakref
from pathlib import Path

from ..._host import host_id

LARGE_BYTES = 2**16
"""The file of a deleted object is kept for reuse if it has at least this size."""

_NAME = re.compile(r"\.tmp-([0-9]+)-([0-9a-f]{8})-[0-9]+-([0-9a-f]{12})")
_MOST_SPARES = 8
_OLD_SECONDS = 3600.0

# The stores of this process, by name. A store that was dropped without being closed counts as gone.
_stores: weakref.WeakValueDictionary[str, object] = weakref.WeakValueDictionary()


def new_store_name(store: object) -> str:
    """A name for a store object of this process. It marks the store's files as in use for as long as the object exists."""
    name = secrets.token_hex(4)
    _stores[name] = store
    return name


def temporary_name(store_name: str, number: int) -> str:
    """The name of a temporary file, which says which process, which store object of it, and which host it belongs to."""
    return f".tmp-{os.getpid()}-{store_name}-{number}-{host_id()}"


def remove_leftovers(root: Path) -> None:
    """Remove the temporary files of processes that are gone. Other processes may do so at the same time.

    A file that cannot be removed stays, and so does anything that is not a regular file with a name of ours.

    Nothing is known of the processes of other machines, so their files are removed when they have not been written to for an
    hour, by the clock of the file system (the last change to the folder itself). If such a process has only slept for so
    long, its file is missing when it is to become an object: that write fails, and can be repeated.
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

    Together they have about as many bytes as were written between two deletions: those of other ranks differ a little in size.
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
        """Whether a file of so many bytes is to be kept."""
        most = max(self._written, self._written_before) * 9 // 8
        return len(self.files) < _MOST_SPARES and sum(self.files.values()) + size <= most


def _gone(pid: str, store_name: str, made_on: str) -> bool | None:
    """Whether the process that made a temporary file is gone; None if that cannot be known.

    If another process has got its id since, the file stays. Files that bear the id of this process are judged by the name of
    their store, since in a container the process before this one often had the very same id.
    """
    if made_on != host_id():
        return None
    if int(pid) == os.getpid():
        return store_name not in _stores
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:  # it is another user's, and exists
        return False
    return False

"""One trial of a harness for all workers of pytest-xdist that run its tests: it takes a while."""

from __future__ import annotations

import fcntl
import hashlib
import sys
from collections.abc import Callable
from pathlib import Path

from ._promises import HarnessFault

_FINE = "fine"


def once(cls: type, folder: Path | None, look: Callable[[], None]) -> str | None:
    """Return what is wrong with the harness of a class; None if nothing is.

    Args:
        cls: The class of the tests.
        folder: A folder that the workers of this run share with no other run; None if there is only
            one process.
        look: A function that raises HarnessFault if something is wrong.
    """
    if folder is None or "<locals>" in cls.__qualname__:  # such classes may share a name
        return _wrong(look)
    module = sys.modules.get(cls.__module__)
    name = f"{getattr(module, '__file__', cls.__module__)}::{cls.__qualname__}"
    path = folder / f"harness-{hashlib.sha256(name.encode()).hexdigest()[:16]}"
    with path.open("a+", encoding="utf-8") as file:
        # The next worker waits here; a worker that dies releases its lock.
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        if verdict := file.read():
            return None if verdict == _FINE else verdict
        wrong = _wrong(look)
        file.write(_FINE if wrong is None else wrong)
        return wrong


def _wrong(look: Callable[[], None]) -> str | None:
    """Return what is wrong, if two looks find a fault.

    A real world may fail for once, and no test would be run because of it.
    """
    wrong = None
    for _ in range(2):
        try:
            look()
        except HarnessFault as fault:
            wrong = str(fault)
        else:
            return None
    return wrong

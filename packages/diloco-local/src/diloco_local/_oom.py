"""Evidence that the kernel killed a process for lack of memory."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


def counter_file(cgroup: str, mount: Path = Path("/sys/fs/cgroup")) -> Path | None:
    """Return the file in which the kernel counts the OOM kills of a control group (version 2).

    It is None if the kernel does not say.

    Args:
        cgroup: The content of ``/proc/self/cgroup``.
        mount: The folder in which the control groups are mounted.
    """
    path = cgroup.partition("0::")[2].partition("\n")[0].strip("/")
    # In a container the path is often the host's, and its own group is the top of the mount.
    candidates = (mount / path / "memory.events", mount / "memory.events")
    return next((file for file in candidates if _kills(file) is not None), None)


def _kills(path: Path | None) -> int | None:
    match = None
    with contextlib.suppress(OSError):
        match = None if path is None else _COUNT.search(path.read_text())
    return None if match is None else int(match[1])


def own_counter() -> Callable[[], int | None]:
    """Return a function that reads the number of OOM kills in our control group.

    The function returns None where the kernel does not tell.
    """
    path = None
    with contextlib.suppress(OSError):
        path = counter_file(Path("/proc/self/cgroup").read_text())
    return partial(_kills, path)


class OomWatch:
    """A watch that assigns each OOM kill once, to the replica that then died of SIGKILL.

    The counter of OOM kills must have risen by then.
    """

    def __init__(self, read: Callable[[], int | None] | None = None) -> None:
        self._read = read or own_counter()
        self._seen = self._read()

    def take(self) -> bool:
        """Say whether an OOM kill explains no other death yet; if so, it is then used up."""
        now = self._read()
        if now is None or self._seen is None or now <= self._seen:
            return False
        self._seen += 1
        return True

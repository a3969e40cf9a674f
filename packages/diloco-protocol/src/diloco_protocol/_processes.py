"""Process trees: adopting orphans, finding what belongs to a replica, signalling it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

_PR_SET_CHILD_SUBREAPER = 36


class Process(NamedTuple):
    """A living process: its id, its parent's, its group's."""

    pid: int
    parent: int
    group: int


def adopt_orphans() -> None:
    """Let orphaned descendants become children of this process (Linux), so that none can slip away."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def members(root: int, group: int) -> list[Process]:
    """Living processes below ``root``, and those of ``group`` wherever they hang, in no order. Zombies do not count.

    Where orphans are not adopted (macOS), one that has left the group as well cannot be found.
    """
    table = processes()
    children: dict[int, list[Process]] = {}
    for process in table:
        children.setdefault(process.parent, []).append(process)
    found = {
        process.pid: process for process in table if process.group == group and process.pid != root
    }
    open_ends = [root, *found]
    while open_ends:
        for process in children.get(open_ends.pop(), []):
            if process.pid not in found and process.pid != root:
                found[process.pid] = process
                open_ends.append(process.pid)
    return list(found.values())


def send(pids: list[int], number: signal.Signals) -> None:
    """Send a signal to processes that may be gone already."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def processes() -> list[Process]:
    """Every living process that this one can see."""
    return from_proc() if Path("/proc/self/stat").exists() else from_ps()


def from_proc() -> list[Process]:
    """The table of processes of Linux."""
    found = (_from_stat(entry) for entry in Path("/proc").iterdir() if entry.name.isdecimal())
    return [process for process in found if process is not None]


def from_ps() -> list[Process]:
    """The table of processes of any Unix."""
    with subprocess.Popen(
        ["ps", "-axo", "pid=,ppid=,pgid=,stat="], stdout=subprocess.PIPE, text=True
    ) as ps:
        listing = ps.communicate()[0]
    if ps.returncode:
        raise OSError(
            f"the processes of this machine cannot be listed: ps exited with code {ps.returncode}"
        )
    rows = (line.split(None, 3) for line in listing.splitlines())
    # ps lists itself, which is gone by now.
    return [
        Process(int(pid), int(parent), int(group))
        for pid, parent, group, state in rows
        if not state.startswith("Z") and int(pid) != ps.pid
    ]


def _from_stat(entry: Path) -> Process | None:
    try:
        # The command's name stands in parentheses and may hold anything, parentheses included.
        state, parent, group = (
            (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[:3]
        )
    except (OSError, ValueError):
        return None  # gone while we looked
    return None if state in "ZX" else Process(int(entry.name), int(parent), int(group))

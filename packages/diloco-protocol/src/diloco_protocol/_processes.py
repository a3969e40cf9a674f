"""Process trees: adopting orphans, finding descendants, ending them all."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Let orphaned descendants become children of this process (Linux), so that none can slip away."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(root: int) -> list[int]:
    """Living processes below ``root``, in no order. Zombies do not count."""
    children: dict[int, list[int]] = {}
    for pid, parent in _processes():
        children.setdefault(parent, []).append(pid)
    found: list[int] = []
    open_ends = [root]
    while open_ends:
        for pid in children.get(open_ends.pop(), []):
            found.append(pid)
            open_ends.append(pid)
    return found


def send(pids: list[int], number: signal.Signals) -> None:
    """Send a signal to processes that may be gone already."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _processes() -> list[tuple[int, int]]:
    """(pid, parent) of every living process."""
    if Path("/proc/self/stat").exists():
        return list(
            filter(None, (_linux_process(entry) for entry in Path("/proc").iterdir() if entry.name.isdecimal()))
        )
    listing = subprocess.run(["ps", "-axo", "pid=,ppid=,stat="], check=True, capture_output=True, text=True).stdout
    rows = (line.split(None, 2) for line in listing.splitlines())
    return [(int(pid), int(parent)) for pid, parent, state in rows if not state.startswith("Z")]


def _linux_process(entry: Path) -> tuple[int, int] | None:
    try:
        # The command's name stands in parentheses and may hold anything, parentheses included.
        state, parent = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
    except (OSError, ValueError):
        return None  # gone while we looked
    return None if state in "ZX" else (int(entry.name), int(parent))

"""The processes of a replica: its runner, everything below it, and whatever tried to slip away."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ._identity import ProcessId, boot_id, has_proc, parse_stat, pid_namespace

#: Every process of a replica inherits this variable; its value is ``<run uid>/<rank>``.
MARKER = "DILOCO_LOCAL_REPLICA"

_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True)
class ProcessEntry:
    """One line of the process table; `group` and `session` are 0 where they are unknown."""

    identity: ProcessId
    parent: int
    group: int
    session: int


def become_subreaper() -> bool:
    """Ask the kernel to hand orphans below this process to it, so that a double fork does not hide a process.

    Returns:
        False where there is no such call (macOS): there the marker in the environment has to do.
    """
    if sys.platform != "linux":
        return False
    return bool(ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)


def process_table() -> dict[int, ProcessEntry]:
    """All living processes (zombies left out) by pid. One pass over /proc, about 30 microseconds a process."""
    if not has_proc():
        return _table_by_psutil()
    table: dict[int, ProcessEntry] = {}
    boot, namespace = boot_id(), pid_namespace()
    for name in os.listdir("/proc"):  # noqa: PTH208  # names only; Path.iterdir costs twice as much
        if not name.isdigit():
            continue
        try:
            text = Path(f"/proc/{name}/stat").read_text(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        state, parent, group, session, start = parse_stat(text)
        if state not in "ZX":
            pid = int(name)
            table[pid] = ProcessEntry(
                ProcessId(pid, start, boot, namespace), parent, group, session
            )
    return table


def _table_by_psutil() -> dict[int, ProcessEntry]:
    import psutil

    table: dict[int, ProcessEntry] = {}
    for process in psutil.process_iter():
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            identity = ProcessId(
                process.pid, repr(process.create_time()), boot_id(), pid_namespace()
            )
            table[process.pid] = ProcessEntry(
                identity, process.ppid(), os.getpgid(process.pid), os.getsid(process.pid)
            )
        except (psutil.Error, ProcessLookupError, PermissionError):
            continue  # gone meanwhile, or another user's
    return table


def marker_of(pid: int) -> str | None:
    """The replica marker in the environment that process ``pid`` was started with, or None."""
    if not has_proc():
        import psutil

        try:
            return str(psutil.Process(pid).environ()[MARKER])
        except (psutil.Error, KeyError, OSError):
            return None
    try:
        data = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # gone, or another user's
        return None
    key = MARKER.encode() + b"="
    for entry in data.split(b"\0"):
        if entry.startswith(key):
            return entry[len(key) :].decode(errors="replace")
    return None


def descendants(table: Mapping[int, ProcessEntry], roots: Iterable[int]) -> set[int]:
    """The pids in ``table`` that are below ``roots``, the living roots included."""
    children: dict[int, list[int]] = {}
    for pid, entry in table.items():
        children.setdefault(entry.parent, []).append(pid)
    found: set[int] = set()
    waiting = [pid for pid in roots if pid in table]
    while waiting:
        pid = waiting.pop()
        if pid not in found:
            found.add(pid)
            waiting.extend(children.get(pid, ()))
    return found


def members(
    marker: str, known: Iterable[ProcessId] = (), table: Mapping[int, ProcessEntry] | None = None
) -> dict[int, ProcessEntry]:
    """The living processes of a replica.

    Found by the marker in their environment, by having been known before (``known``), and by descent from either:
    a process that cleared its environment is still found below one that did not, and one that was orphaned is
    still found by its marker.
    """
    table = process_table() if table is None else table
    roots = {
        identity.pid
        for identity in known
        if identity.pid in table and table[identity.pid].identity == identity
    }
    roots.update(pid for pid in table if pid not in roots and marker_of(pid) == marker)
    return {pid: table[pid] for pid in descendants(table, roots)}

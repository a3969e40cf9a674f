"""The processes of a replica: its runner, everything below it, and all that tried to slip away."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from diloco_protocol.backend import descendants, processes

from ._identity import ProcessId, boot_id, has_proc, pid_namespace

#: Every process of a replica inherits this variable; its value is ``<run uid>/<rank>``.
MARKER = "DILOCO_LOCAL_REPLICA"


@dataclass(frozen=True, slots=True)
class ProcessEntry:
    """A living process: its identity, and its parent's id."""

    identity: ProcessId
    parent: int


def process_table() -> dict[int, ProcessEntry]:
    """Return all living processes (without zombies) by pid."""
    if not has_proc():
        return _table_by_psutil()
    boot, namespace = boot_id(), pid_namespace()
    return {
        process.pid: ProcessEntry(
            ProcessId(process.pid, process.start, boot, namespace), process.parent
        )
        for process in processes()
    }


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
            table[process.pid] = ProcessEntry(identity, process.ppid())
        except psutil.Error:
            continue  # gone meanwhile, or another user's
    return table


def marker_of(pid: int) -> str | None:
    """Return the replica marker in the environment that process ``pid`` was started with, or None.

    Raises:
        OSError: That cannot be known at the moment, for example for want of file descriptors.
    """
    if not has_proc():
        import psutil

        try:
            return str(psutil.Process(pid).environ()[MARKER])
        except (psutil.Error, KeyError, OSError):
            return None
    try:
        data = Path(f"/proc/{pid}/environ").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):  # gone, or another user's
        return None
    key = MARKER.encode() + b"="
    for entry in data.split(b"\0"):
        if entry.startswith(key):
            return entry[len(key) :].decode(errors="replace")
    return None


def below(table: Mapping[int, ProcessEntry], roots: Iterable[int]) -> set[int]:
    """Return the pids in ``table`` that are below ``roots``, including the living roots."""
    return descendants({pid: entry.parent for pid, entry in table.items()}, roots)


def members(
    marker: str, known: Iterable[ProcessId] = (), table: Mapping[int, ProcessEntry] | None = None
) -> dict[int, ProcessEntry]:
    """Return the living processes of a replica.

    They are found by the marker in their environment, by having been known before (``known``), and
    by descent from either: a process that cleared its environment is still found below one that did
    not, and one that was orphaned is still found by its marker.
    """
    table = process_table() if table is None else table
    roots = {
        identity.pid
        for identity in known
        if identity.pid in table and table[identity.pid].identity == identity
    }
    roots.update(pid for pid in table if pid not in roots and marker_of(pid) == marker)
    return {pid: table[pid] for pid in below(table, roots)}

"""The processes of a replica: its runner, everything below it, and all that tried to slip away.

A pid may be used again, but not with its start, boot and namespace.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import signal
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco_protocol.backend import check_whole, descendants, processes, read_process

_PROC = Path("/proc")
_LARGEST_PID = 2**31 - 1


@functools.cache
def has_proc() -> bool:
    """Say whether this machine has Linux's /proc; elsewhere psutil is asked."""
    return (_PROC / "self" / "stat").exists()


@functools.cache
def boot_id() -> str:
    """Return an id that changes with every boot.

    It is "" where the start time of a process is already absolute (macOS).
    """
    if not has_proc():
        return ""
    return (_PROC / "sys/kernel/random/boot_id").read_text().strip()


def pid_namespace() -> str:
    """Return the PID namespace in which this process counts pids, "" where there are none."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def host_name() -> str:
    """Return the name by which a handle knows its machine."""
    return platform.node()


def start_time(pid: int) -> str | None:
    """Return when the process with this pid started, in an opaque, exact form.

    None if it is gone or a zombie.
    """
    if has_proc():
        living = read_process(pid)
        return None if living is None else living.start
    import psutil

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else repr(process.create_time())
    except psutil.NoSuchProcess:
        return None


@dataclass(frozen=True, slots=True)
class ProcessId:
    """One process and no other, even after its pid has been used again.

    Attributes:
        pid: The process id, as seen in ``namespace``.
        start: Its start time (clock ticks since boot on Linux), opaque.
        boot: The boot it belongs to.
        namespace: The PID namespace it belongs to.
    """

    pid: int
    start: str
    boot: str = ""
    namespace: str = ""

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        """Return the identity of the living process ``pid``; None if no such process lives."""
        start = start_time(pid)
        return None if start is None else cls(pid, start, boot_id(), pid_namespace())

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ProcessId:
        """Make an identity from its fields, as :func:`asdict` returns them.

        Raises:
            ValueError: There is no process with such a number; some numbers mean many processes to
                the system.
        """
        pid = check_whole("a pid", data["pid"], 1, _LARGEST_PID)
        return cls(pid, str(data["start"]), str(data["boot"]), str(data["namespace"]))

    def alive(self) -> bool:
        """Say whether exactly this process still runs (a zombie does not)."""
        return (
            self.boot == boot_id()
            and self.namespace == pid_namespace()
            and start_time(self.pid) == self.start
        )

    def send(self, number: signal.Signals) -> bool:
        """Signal exactly this process.

        Returns:
            False if it is gone, or has taken another user's rights, as sudo does; a later owner of
            the pid is never hit.
        """
        descriptor = _held(self.pid)
        try:
            # The descriptor holds the process; the start time then says whether it is the right
            # one.
            if not self.alive():
                return False
            if descriptor is None:
                os.kill(self.pid, number)
            else:
                signal.pidfd_send_signal(descriptor, number)
        except (ProcessLookupError, PermissionError):
            return False
        finally:
            if descriptor is not None:
                os.close(descriptor)
        return True


def _held(pid: int) -> int | None:
    """Return a descriptor that holds a process, so that no other one gets its pid."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # a sandbox or kernel without it, or too many open files
            return os.pidfd_open(pid)
    return None


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

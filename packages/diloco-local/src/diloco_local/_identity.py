"""The identity of a process: its pid may be reused, but not with its start, boot and namespace."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import signal
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from diloco_protocol.backend import read_process

_PROC = Path("/proc")


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
        """Make an identity from what `to_dict` returned.

        Raises:
            ValueError: There is no process with such a number; some numbers mean many processes to
                the system.
        """
        if type(data["pid"]) is not int or not 0 < data["pid"] < 1 << 31:
            raise ValueError("a pid is a number from 1")
        return cls(int(data["pid"]), str(data["start"]), str(data["boot"]), str(data["namespace"]))

    def to_dict(self) -> dict[str, Any]:
        """Return the identity as JSON values."""
        return asdict(self)

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

"""Process trees: adopting orphans, finding a replica's processes, signals and wait statuses."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
from collections.abc import Iterable, Mapping
from typing import NamedTuple

_PR_SET_CHILD_SUBREAPER = 36
_SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN})


class Process(NamedTuple):
    """A living process.

    Attributes:
        pid: Its id.
        parent: Its parent's id.
        group: Its process group's id.
        start: When it started, in an opaque, exact form (Linux: clock ticks since the boot); a
            later process with the same id has another value. Empty if the system does not say
            (macOS).
    """

    pid: int
    parent: int
    group: int
    start: str = ""


def is_shortage(error: OSError) -> bool:
    """Return whether the system has run out of a resource for now, such as file descriptors.

    Such an error says nothing about a file.
    """
    return error.errno in _SHORTAGES


def adopt_orphans() -> None:
    """Let orphaned descendants become children of this process (Linux).

    So a double fork does not hide any of them.
    """
    if sys.platform == "linux":
        import ctypes  # slow to import

        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(parents: Mapping[int, int], roots: Iterable[int]) -> set[int]:
    """Return the ids of the processes below ``roots``, and of the roots that are alive.

    Args:
        parents: Maps the id of every living process to the id of its parent.
        roots: Ids to begin with; ids that are not in ``parents`` are ignored.
    """
    children: dict[int, list[int]] = {}
    for pid, parent in parents.items():
        children.setdefault(parent, []).append(pid)
    below: set[int] = set()
    waiting = [pid for pid in roots if pid in parents]
    while waiting:
        pid = waiting.pop()
        if pid not in below:
            below.add(pid)
            waiting.extend(children.get(pid, ()))
    return below


def members(root: int, group: int) -> list[Process]:
    """Return living processes below ``root``, and those of ``group`` and below, in no order.

    Zombies do not count. Where orphans are not adopted (macOS), a process that has also left the
    group cannot be found.
    """
    table = {process.pid: process for process in processes()}
    parents = {process.pid: process.parent for process in table.values()}
    roots = [root, *(process.pid for process in table.values() if process.group == group)]
    return [table[pid] for pid in descendants(parents, roots) if pid != root]


def send(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to processes that may be gone already."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def processes() -> list[Process]:
    """Return every living process that this one can see, in no order.

    Takes about 30 microseconds per process on Linux.
    """
    return from_proc() if os.path.exists("/proc/self/stat") else from_ps()  # noqa: PTH110 - fast


def from_proc() -> list[Process]:
    """Return the processes of Linux, from ``/proc``."""
    # Names only: Path.iterdir costs twice as much.
    table = (read_process(int(name)) for name in os.listdir("/proc") if name.isdecimal())  # noqa: PTH208
    return [process for process in table if process is not None]


def from_ps() -> list[Process]:
    """Return the processes of any Unix, from ``ps``."""
    import subprocess  # slow to import

    with subprocess.Popen(
        ["ps", "-axo", "pid=,ppid=,pgid=,stat="], stdout=subprocess.PIPE, text=True
    ) as ps:
        listing = ps.communicate()[0]
    if ps.returncode:
        raise OSError(
            f"the processes of this machine cannot be listed: ps exited with code {ps.returncode}"
        )
    rows = (line.split(None, 3) for line in listing.splitlines())
    # ps lists itself, and has ended by now.
    return [
        Process(int(pid), int(parent), int(group))
        for pid, parent, group, state in rows
        if not state.startswith("Z") and int(pid) != ps.pid
    ]


def read_process(pid: int) -> Process | None:
    """Return one process of Linux; None if it is gone, a zombie, or hidden from this user.

    Raises:
        OSError: The process cannot be read at the moment, such as for lack of file descriptors.
    """
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as stat:  # noqa: PTH123 - once per process
            return parse_stat(pid, stat.read())
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None


def parse_stat(pid: int, text: str) -> Process | None:
    """Return a process, from the text of ``/proc/<pid>/stat``.

    None if it is a zombie, or if the text was cut off because the process just ended.

    The second field is the program's name in parentheses, and may itself contain blanks and
    parentheses. So the fields are counted from the last closing parenthesis.
    """
    fields = text.rpartition(")")[2].split()
    if len(fields) < 20 or fields[0] in "ZX":
        return None
    return Process(pid, int(fields[1]), int(fields[2]), fields[19])


# The signals of Linux and macOS: a launcher on one system reads what happened on the other.
_NAMES = frozenset(
    f"SIG{name}"
    for names in (
        "ABRT ALRM BUS CHLD CLD CONT EMT FPE HUP ILL INFO INT IO IOT KILL PIPE POLL PROF PWR QUIT",
        "RTMAX RTMIN SEGV STKFLT STOP SYS TERM TRAP TSTP TTIN TTOU URG USR1 USR2 VTALRM WINCH XCPU",
        "XFSZ",
    )
    for name in names.split()
)
_NUMBERED = frozenset(f"signal {number}" for number in range(1, 128))


def signal_name(number: int) -> str:
    """Return the name of a signal, such as ``"SIGKILL"`` for 9.

    Signals without a name of their own, such as real-time ones, are ``"signal 40"``.
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def is_signal_name(text: str) -> bool:
    """Return whether :func:`signal_name` gives this text for a signal, on any system."""
    return text in _NAMES or text in _NUMBERED


def read_wait_status(status: int) -> tuple[int, str | None]:
    """Return the exit code and the signal's name in the status that ``os.waitpid`` returned.

    The name is None if no signal ended the process. A process that signal n ended has the exit code
    128 + n, as in shells.
    """
    code = os.waitstatus_to_exitcode(status)
    return (128 - code, signal_name(-code)) if code < 0 else (code, None)

"""Names of signals, and what a wait status says."""

from __future__ import annotations

import os
import signal

# Those of Linux and macOS: a launcher on the one reads what happened on the other.
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
    """``"SIGKILL"`` for 9; signals without a name of their own, such as real-time ones, are ``"signal 40"``."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def is_signal_name(text: str) -> bool:
    """Whether :func:`signal_name` gives this text for a signal, here or on another system."""
    return text in _NAMES or text in _NUMBERED


def read_wait_status(status: int) -> tuple[int, str | None]:
    """The exit code and the signal's name (None if no signal ended the process) in what ``os.waitpid`` returned.

    A process that signal n ended has the exit code 128 + n, as shells count.
    """
    code = os.waitstatus_to_exitcode(status)
    return (128 - code, signal_name(-code)) if code < 0 else (code, None)

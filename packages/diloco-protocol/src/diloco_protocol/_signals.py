"""Names of signals, and the meaning of wait statuses."""

from __future__ import annotations

import os
import signal

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

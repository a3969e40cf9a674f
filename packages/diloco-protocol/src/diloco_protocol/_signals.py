"""Names of signals, and what a wait status says."""

from __future__ import annotations

import os
import signal


def signal_name(number: int) -> str:
    """``"SIGKILL"`` for 9; signals without a name of their own, such as real-time ones, are ``"signal 40"``."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def read_wait_status(status: int) -> tuple[int, str | None]:
    """The exit code and the signal's name (None if no signal ended the process) in what ``os.waitpid`` returned.

    A process that signal n ended has the exit code 128 + n, as shells count.
    """
    code = os.waitstatus_to_exitcode(status)
    return (128 - code, signal_name(-code)) if code < 0 else (code, None)

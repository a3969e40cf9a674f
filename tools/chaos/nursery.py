"""Starts incarnations quickly: torch is imported once, and each is a fork of this process.

Reads a line of JSON per command on stdin, ``{"start": number, "arguments": {…}, "errors": path}``;
with ``"export": true`` it is an export of the run, not an incarnation. Answers on stdout with
``{"number", "pid"}`` at once and ``{"number", "status"}`` at the end (a negative status: killed by
that signal).
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import sys
from typing import Any

import torch  # noqa: F401 - every incarnation needs it
import worker

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Obey until stdin ends; then kill what still lives."""
    die_with_parent()
    running: dict[int, int] = {}
    rest = b""
    while True:
        ready, _, _ = select.select([0], [], [], 0.02)
        if ready:
            data = os.read(0, 2**16)
            if not data:
                break
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                command = json.loads(line)
                pid = fork(command)
                running[pid] = command["start"]
                say(number=command["start"], pid=pid)
        while running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            say(number=running.pop(pid), status=os.waitstatus_to_exitcode(status))
    for pid in running:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def fork(command: dict[str, Any]) -> int:
    """Begin an incarnation."""
    pid = os.fork()
    if pid:
        return pid
    status = worker.FAILED
    try:
        die_with_parent()
        nothing = os.open(os.devnull, os.O_RDWR)
        errors = os.open(command["errors"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        for number, file in ((0, nothing), (1, nothing), (2, errors)):
            os.dup2(file, number)
        act = (
            worker.live
            if "export" not in command
            else lambda arguments: worker.examine(**arguments)
        )
        status = act(command["arguments"])
        sys.stderr.flush()
    finally:
        os._exit(status)


def say(**fields: Any) -> None:
    """Answer."""
    os.write(1, (json.dumps(fields) + "\n").encode())


def die_with_parent() -> None:
    """Linux only: whatever ends the parent ends this process too."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main()

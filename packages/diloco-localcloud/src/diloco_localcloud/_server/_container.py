"""A container that is a process: one run of it, or a command beside it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

Json = dict[str, Any]

# The variables that the "image" gives every container: those of this machine.
FROM_HERE = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "PYTHONPATH")


def image_environment() -> dict[str, str]:
    """Return the default environment of every image.

    It has a few variables of this process, and its Python first on the PATH.
    """
    env = {name: os.environ[name] for name in FROM_HERE if name in os.environ}
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", os.defpath)])
    return env


@dataclass(frozen=True)
class Command:
    """The command to start.

    Attributes:
        argv: program and arguments.
        env: the whole environment.
        cwd: the working directory.
        log: the file for the output; None if it has streams.
        memory: limit in bytes; None for no limit.
        wrapper: words before the command that are not part of the container.
        streams: descriptors for stdin, stdout and stderr, in place of a log.
    """

    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: Path
    log: Path | None
    memory: int | None = None
    wrapper: Sequence[str] = ()
    streams: Sequence[int] = ()


class Container:
    """Starts a command below a shim, and reports its start and end.

    ``told`` is called from a thread of its own with
    ``{"event": "started" | "refused" | "ended", ...}``; the last of them is always "refused" or
    "ended". Thread-safe.
    """

    def __init__(self, command: Command, tell: Callable[[Json], None]) -> None:
        self.pid: int | None = None
        self._told = tell
        self._lock = threading.Lock()
        wanted = {
            "argv": list(command.argv),
            "env": dict(command.env),
            "cwd": str(command.cwd),
            "log": str(command.log) if command.log else None,
            "memory": command.memory,
            "wrapper": list(command.wrapper),
            "streams": list(command.streams),
        }
        text = json.dumps(wanted).encode()
        shim = [sys.executable, "-I", "-S", str(Path(__file__).with_name("_shim.py"))]
        self._shim = subprocess.Popen(
            shim,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            pass_fds=command.streams,
        )
        try:
            self._reader = threading.Thread(target=self._read, name="container", daemon=True)
            self._reader.start()
        except BaseException:
            # Its end would not be noticed. The shim has not received a command yet, and ends with
            # its stdin.
            with self._shim:
                raise
        self._write(b"%d\n%s" % (len(text), text))

    def term(self) -> None:
        """Send SIGTERM to the first process, as a kubelet does."""
        self.send(signal.SIGTERM)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the first process."""
        self._write(b"%d\n" % number)

    def kill(self) -> None:
        """Send SIGKILL to all processes."""
        self._write(b"kill\n")

    def join(self) -> None:
        """Wait until no process is left, and ``told`` has been called for the last time."""
        self._reader.join()

    def _write(self, words: bytes) -> None:
        with self._lock, contextlib.suppress(OSError, ValueError):  # it has ended already
            if self._shim.stdin is not None:
                self._shim.stdin.write(words)
                self._shim.stdin.flush()

    def _read(self) -> None:
        last: Json = {}
        with self._shim:
            for line in self._shim.stdout or ():
                last = json.loads(line)
                self.pid = last.get("pid", self.pid)
                if last["event"] != "ended":
                    self._told(last)
            # Orders that came too late are still in the buffer, and cannot be flushed. They must
            # not hide the end.
            with self._lock, contextlib.suppress(OSError):
                if self._shim.stdin is not None:
                    self._shim.stdin.close()
        if last.get("event") == "ended":
            self._told(last)
        elif last.get("event") != "refused":  # the shim was killed from outside
            if self.pid is not None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.pid, signal.SIGKILL)
            self._told({"event": "ended", "code": 137, "signal": 9, "oom": False})

"""A container that is a process: one run of it, or a command beside it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Json = dict[str, Any]

# The variables that the "image" gives every container: those of this machine.
FROM_HERE = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "PYTHONPATH")

# The wait for output that is on its way when a shim was killed: processes may be left that write.
_DRAIN_SECONDS = 2.0


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
        memory: limit in bytes; None for no limit.
        streams: descriptors for stdin, stdout and stderr; none if its output is passed on.
    """

    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: Path
    memory: int | None = None
    streams: Sequence[int] = ()


class Container:
    """Starts a command below a shim, and reports its start and end.

    ``tell`` is called from a thread of its own with
    ``{"event": "started" | "refused" | "ended", ...}``; the last of them is always "refused" or
    "ended". Before that, ``read`` has passed on all output: it is given the reading ends of the
    pipes of stdout and stderr, in a thread of its own. Thread-safe.
    """

    def __init__(
        self,
        command: Command,
        tell: Callable[[Json], None],
        read: Callable[[Sequence[int]], None] | None = None,
    ) -> None:
        self.pid: int | None = None
        self._told = tell
        self._lock = threading.Lock()
        streams, ours = list(command.streams), list[int]()
        readers: Sequence[int] = ()
        if read is not None:
            readers, writers = zip(os.pipe(), os.pipe(), strict=True)
            streams = ours = [os.open(os.devnull, os.O_RDONLY), *writers]
        wanted = {**vars(command), "cwd": str(command.cwd), "streams": streams}
        text = json.dumps(wanted | {"argv": [*command.argv], "env": {**command.env}}).encode()
        shim = [sys.executable, "-I", "-S", str(Path(__file__).with_name("_shim.py"))]
        try:
            self._shim = subprocess.Popen(
                shim,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
                pass_fds=streams,
            )
        except BaseException:
            _close(readers)
            raise
        finally:
            _close(ours)
        self._threads = [threading.Thread(target=self._read, name="container", daemon=True)]
        if read is not None:
            output = threading.Thread(target=read, args=(readers,), name="output", daemon=True)
            self._threads.insert(0, output)
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:
            if self._threads[0].ident is None:  # otherwise it closes them itself
                _close(readers)
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
        self._threads[-1].join()

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
                if last["event"] == "started":
                    self._told(last)
            # Orders that came too late are still in the buffer, and cannot be flushed. They must
            # not hide the end.
            with self._lock, contextlib.suppress(OSError):
                if self._shim.stdin is not None:
                    self._shim.stdin.close()
        patience = None
        if last.get("event") not in ("ended", "refused"):  # the shim was killed from outside
            patience = _DRAIN_SECONDS
            if self.pid is not None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.pid, signal.SIGKILL)
            last = {"event": "ended", "code": 137, "signal": 9, "oom": False}
        for output in self._threads[:-1]:
            output.join(patience)  # soon over, as no process is left that could write
        self._told(last)


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        with contextlib.suppress(OSError):  # must not hide a container that runs
            os.close(descriptor)

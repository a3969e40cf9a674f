"""The process between the kubelet and a container's first process, which looks after the container.

Run as a script.

Stdin says what to start (a line with a length, then so many bytes of JSON); then ``kill``, or the
numbers of signals for the first process, may follow, one per line. When stdin ends, because the
process that started this one is gone, everything is killed, so that no process is ever left. Events
are reported in JSON lines on stdout. The process gets descriptors ("streams") in place of its
standard ones.

It imports nothing from the package, so that it starts fast and in any interpreter.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from typing import Any

LOOK_SECONDS = 0.1  # between two looks at the memory


class Shim:
    """One run of one container."""

    def __init__(self, wanted: dict[str, Any]) -> None:
        self._limit = wanted.get("memory")
        self._ended: int | None = None
        self._oom = False
        streams = wanted["streams"]
        self._wake, wake = os.pipe()
        for end in (self._wake, wake):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # On Linux, a subreaper: orphans come here.
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
        try:
            options = dict(zip(("stdin", "stdout", "stderr"), streams, strict=True))
            options |= {"env": wanted["env"], "cwd": wanted["cwd"]}
            self._child = subprocess.Popen(wanted["argv"], start_new_session=True, **options)
        finally:
            for stream in streams:
                os.close(stream)
        self.root = self._child.pid

    def run(self) -> dict[str, Any]:
        """Wait until the command and all processes that it started have ended; return the end."""
        self._wait()
        self._kill_all()
        status = self._ended or 0
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
        code = 137 if self._oom else 128 + number if number else os.WEXITSTATUS(status)
        return {"code": code, "signal": number, "oom": self._oom, "at": time.time()}

    def _wait(self) -> None:
        with selectors.DefaultSelector() as ready:
            for descriptor in (0, self._wake):
                ready.register(descriptor, selectors.EVENT_READ)
            while self._ended is None:
                for key, _ in ready.select(LOOK_SECONDS if self._limit else None):
                    if key.fd == 0:
                        self._obey()
                    else:
                        os.read(self._wake, 4096)
                self._reap()
                if self._limit and self._ended is None and self._memory() > self._limit:
                    self._oom = True
                    self._kill_all()

    def _obey(self) -> None:
        words = os.read(0, 4096)
        if not words or b"kill" in words:
            self._kill_all()
            return
        for word in words.split():
            if self._ended is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.root, int(word))

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.root:
                self._ended = status

    def _kill_all(self) -> None:
        """Kill until no process is left, including those that fork meanwhile."""
        deadline = time.monotonic() + 5.0
        while time.monotonic() < deadline:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.root, signal.SIGKILL)
            left = list(descendants(os.getpid()))
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            self._reap()
            if not left:
                return
            time.sleep(0.005)

    def _memory(self) -> int:
        return sum(private_bytes(pid) for pid in descendants(os.getpid()))


def descendants(root: int) -> list[int]:
    """Return the living processes below ``root``, without zombies."""
    children: dict[int, list[int]] = {}
    for pid, parent in table():
        children.setdefault(parent, []).append(pid)
    below: list[int] = []
    waiting = list(children.get(root, ()))
    while waiting:
        pid = waiting.pop()
        below.append(pid)
        waiting += children.get(pid, ())
    return below


def table() -> list[tuple[int, int]]:
    """Return (pid, parent) of all living processes."""
    rows: list[tuple[int, int]] = []
    # Importing pathlib would cost as much as everything else here.
    if not os.path.exists("/proc/self/stat"):  # noqa: PTH110
        words = ["ps", "-axo", "pid=,ppid=,stat="]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as ps:
            for line in ps.communicate()[0].splitlines():
                pid, parent, state = line.split()
                if not state.startswith("Z") and int(pid) != ps.pid:
                    rows.append((int(pid), int(parent)))
        return rows
    for name in os.listdir("/proc"):  # noqa: PTH208
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as stat:  # noqa: PTH123
                fields = stat.read().rpartition(b")")[2].split()
                if fields[0] not in (b"Z", b"X"):
                    rows.append((int(name), int(fields[1])))
    return rows


def private_bytes(pid: int) -> int:
    """Return about how much memory a process does not share; 0 if it cannot be read."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as statm:  # noqa: PTH123
            _, resident, shared = statm.read().split()[:3]
    except OSError:
        return 0
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


def say(**words: Any) -> None:
    """Write one line to the kubelet, which may be gone."""
    with contextlib.suppress(OSError):
        os.write(1, json.dumps(words).encode() + b"\n")


def read(length: int) -> bytes:
    """Read so many bytes on stdin, and not one more."""
    text = b""
    while len(text) < length:
        piece = os.read(0, length - len(text))
        if not piece:
            sys.exit(1)
        text += piece
    return text


def main() -> None:
    """Start the command that stdin names, and look after it until its end."""
    line = b""
    while not line.endswith(b"\n"):
        line += read(1)
    text = read(int(line))
    try:
        shim = Shim(json.loads(text))
    except OSError as wrong:
        say(event="refused", message=f"{wrong.strerror}: {wrong.filename}")
        return
    except ValueError as wrong:  # a word or a variable that no process can have
        say(event="refused", message=str(wrong))
        return
    say(event="started", pid=shim.root, at=time.time())
    say(event="ended", **shim.run())


if __name__ == "__main__":
    main()

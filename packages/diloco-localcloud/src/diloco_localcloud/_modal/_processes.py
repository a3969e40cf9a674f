"""Runs each call in a process of Modal's own entrypoint of containers.

A shim above it ends all processes that it has started.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .._server._container import Command, Container
from .._server._output import read_lines
from ._hands import HeldCall, HeldWorkspace
from ._workspace._call import Call, Life, Result, Status
from ._workspace._workspace import Workspace

HEADER = "x-stand-in-container"
_SOURCES = ("stdout", "stderr")
_IDLE_SECONDS = 0.05


class Runner:
    """The containers of a workspace; called under its lock, unless a method says otherwise.

    Args:
        workspace: the workspace whose calls it runs.
        folder: the folder for the containers' files; it exists as long as they do.
        base: the environment that the "image" gives every container.
    """

    def __init__(self, workspace: Workspace, folder: Path, base: Mapping[str, str]) -> None:
        self._workspace = workspace
        self._folder = folder
        self._base = base
        self._running: dict[str, Container] = {}
        self._closed = False
        #: The environment of clients and the maker of arguments, once there is a server.
        self.connect: Mapping[str, str] = {}
        self.arguments: Callable[[Call, str], tuple[bytes, list[str]] | None] | None = None

    def start(self, call: Call, life: Life) -> None:
        """Start the container of a call."""
        order = None if self.arguments is None else self.arguments(call, life.task_id)
        if order is None or self._closed:
            text = f"function {call.function.name!r} was deployed without code; "
            text += "deploy it with the client of Modal"
            self._workspace.calls.finish(call, Result(Status.INTERNAL_FAILURE, message=text))
            life.ended = self._workspace.timeline.now()
            return
        home = self._folder / life.task_id
        arguments, mounts = order
        (home / "root").mkdir(parents=True)
        (home / "arguments").write_bytes(arguments)
        self._mount(home, mounts)

        def log(number: int, text: bytes) -> None:
            self._log(call, life, _SOURCES[number], text.decode(errors="replace"))

        command = Command(
            [sys.executable, "-m", "modal._container_entrypoint"],
            self._environment(call, life, home),
            home / "root",
            (call.function.memory_limit << 20) or None,
        )
        self._running[life.task_id] = Container(
            command,
            lambda event: self._told(call, life, event),
            lambda pipes: read_lines(pipes, log, idle_seconds=_IDLE_SECONDS),
        )

    def interrupt(self, call: Call, life: Life) -> None:
        """Send SIGINT to its first process, and SIGKILL to all of them after the grace."""
        del call
        container = self._running.get(life.task_id)
        if container is not None:
            container.send(signal.SIGINT)
        grace = self._workspace.habits.grace_seconds
        self._workspace.timeline.after(grace, lambda: self.kill(life.task_id))

    def kill(self, task_id: str) -> None:
        """Send SIGKILL to every process of a container; do nothing if it is gone."""
        container = self._running.get(task_id)
        if container is not None:
            container.kill()

    def pid(self, task_id: str) -> int | None:
        """Return the PID of a container's first process; None before and after it exists."""
        container = self._running.get(task_id)
        return None if container is None else container.pid

    def close(self) -> None:
        """End every container, and wait until no process is left; not called under the lock."""
        with self._workspace.lock:
            self._closed = True
            running = list(self._running.values())
        for container in running:
            container.kill()
        for container in running:
            container.join()

    def _mount(self, home: Path, mounts: list[str]) -> None:
        """Put the local files that were uploaded with a function into its container's folder."""
        for mount_id in mounts:
            for name, digest in self._workspace.mounts.get(mount_id, ()):
                path = home.joinpath(*(part for part in name.split("/") if part not in ("", "..")))
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(self._workspace.files[digest])

    def _environment(self, call: Call, life: Life, home: Path) -> dict[str, str]:
        # Modal's worker tells containers apart by their sockets; the stand-in does so by a secret
        # header.
        word = secrets.token_hex(16)
        self._workspace.containers[word] = life.task_id
        env, by_id = dict(self._base), self._workspace.secrets
        for secret_id in call.function.secret_ids:
            env |= by_id[secret_id].values if secret_id in by_id else {}
        paths = [str(home / "root"), env.get("PYTHONPATH", "")]
        client = ("MODAL_SERVER_URL", "MODAL_CONFIG_PATH", "NO_PROXY")
        return {
            **env,
            **{name: self.connect[name] for name in client},
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "MODAL_OVERRIDE_HEADERS": f"{HEADER}:{word}",
            "MODAL_CONTAINER_ARGUMENTS_PATH": str(home / "arguments"),
            "MODAL_TASK_ID": life.task_id,
            "MODAL_IS_REMOTE": "1",
            "MODAL_ENVIRONMENT": call.function.app.environment,
            "PYTHONUNBUFFERED": "1",
        }

    def _told(self, call: Call, life: Life, event: Any) -> None:
        """Record that a container has started or ended; called from the container's thread."""
        if event["event"] == "started":
            return
        with self._workspace.lock:
            self._running.pop(life.task_id, None)
            if not self._closed:
                self._workspace.calls.gone(call, life, _left(event))
            else:
                life.ended = self._workspace.timeline.now()

    def _log(self, call: Call, life: Life, source: str, text: str) -> None:
        with self._workspace.lock:
            now = self._workspace.timeline.now()
            self._workspace.logs.write(now, call, life.task_id, text, source)
            self._workspace.changed()


def _left(event: Mapping[str, Any]) -> Result:
    """Return the result of a container that has left none itself."""
    if event["event"] == "refused":
        return Result(Status.INTERNAL_FAILURE, message=event["message"])
    if event.get("oom"):
        text = "Runner was terminated because it ran out of memory"
        return Result(Status.KERNEL_OOM_KILL, message=text)
    return Result(Status.FAILURE, message=f"Runner failed with exit code: {event['code']}")


class LocalCall(HeldCall):
    """A call whose container is a process of this machine.

    An action that does not fit its state does nothing. Thread-safe.
    """

    def __init__(self, workspace: Workspace, call: Call, runner: Runner) -> None:
        super().__init__(workspace, call)
        self._runner = runner

    @property
    def pid(self) -> int | None:
        """Return the PID of its container's first process; None if no container of it runs."""
        with self._workspace.lock:
            life = self._call.life
            return None if life is None else self._runner.pid(life.task_id)

    def kill(self) -> None:
        """Kill its container with all its processes, from outside: it leaves no result."""
        with self._workspace.lock:
            if self._call.life is not None:
                self._runner.kill(self._call.life.task_id)


class LocalCalls(HeldWorkspace[LocalCall]):
    """The calls that run as processes, and the objects that they use; thread-safe."""

    def __init__(self, workspace: Workspace, runner: Runner) -> None:
        super().__init__(workspace)
        self._runner = runner

    def _hold(self, call: Call) -> LocalCall:
        return LocalCall(self._workspace, call, self._runner)

    def wait_for(self, predicate: Callable[[], object], seconds: float = 60.0) -> None:
        """Wait until ``predicate()`` is true; it is called after every change.

        Raises:
            TimeoutError: it is not true after so many seconds.
        """
        with self._workspace.lock:
            if not self._workspace.lock.wait_for(predicate, seconds):
                raise TimeoutError(f"what was waited for has not come in {seconds:g} s")

"""One pod on this machine: its folder and its containers."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..._server._container import Command, Container
from ..._server._files import open_regular
from ..._server._output import read_lines
from .._control._runtime import ENTRY_BYTES, Log
from .._objects._quantities import quantity
from .._objects._store import Store
from . import _environment, _volumes

Json = dict[str, Any]

MESSAGE_BYTES = 4096


@dataclass(frozen=True)
class Inside:
    """The environment, working directory and real paths of every process of a container."""

    env: Mapping[str, str]
    cwd: Path
    paths: Mapping[str, str]


class Sandbox:
    """The folder of a pod, and the containers that run in it; used under the cluster's lock.

    Attributes:
        containers: the running containers, by their names.
        beside: the commands that ``exec`` has started in them.
        logs: the logs, by container.
        telling: the number of ended containers that the API server does not know of yet.
    """

    def __init__(
        self,
        store: Store,
        folder: Path,
        base: Mapping[str, str],
    ) -> None:
        self.containers: dict[str, Container] = {}
        self.beside: dict[str, set[Container]] = {}
        self.logs: dict[str, Log] = {}
        self.telling = 0
        self._inside: dict[str, Inside] = {}
        self._store = store
        self._folder = folder
        self._base = base

    def start(
        self,
        pod: Json,
        container: Json,
        tell: Callable[[Json], None],
        write: Callable[[Log, bytes], None],
    ) -> bool:
        """Start a container; return False, without a report, if it has no command.

        ``write`` adds to its log, and is called from another thread.

        Raises:
            ConfigError: its configuration refers to an object that does not exist.
        """
        name = container["name"]
        home = self._folder / name
        (home / "root").mkdir(parents=True, exist_ok=True)
        termination = home / "termination"
        folders = _volumes.make(self._store, pod, self._folder)
        known = _volumes.paths(pod, container, folders, termination)
        base = {**self._base, "HOSTNAME": pod["spec"].get("hostname", pod["metadata"]["name"])}
        env = _environment.resolve(self._store, pod, container, base)
        names = {entry["name"] for entry in container.get("env") or []} & env.keys()
        env |= {name: _volumes.rewrite(env[name], known) for name in names}
        words = [*(container.get("command") or []), *(container.get("args") or [])]
        argv = [_volumes.rewrite(_environment.expand(word, env), known) for word in words]
        inside = container.get("workingDir")
        cwd = Path(_volumes.rewrite(inside, known)) if inside else home / "root"
        self._inside[name] = Inside(env, cwd, known)
        limit = ((container.get("resources") or {}).get("limits") or {}).get("memory")
        log = self.logs[name] = Log()
        if not argv:
            return False
        memory = int(quantity(limit)) if limit else None
        unfinished = None  # the stream whose last line has no end

        def add(stream: int, text: bytes) -> None:
            nonlocal unfinished
            write(log, b"\n" + text if unfinished not in (None, stream) else text)
            begun = len(text) - text.rfind(b"\n") - 1
            unfinished = stream if begun % ENTRY_BYTES else None

        self.containers[name] = Container(
            Command(argv, env, cwd, memory),
            tell,
            lambda pipes: read_lines(pipes, add, most=ENTRY_BYTES),
        )
        return True

    def execute(
        self, name: str, words: Sequence[str], streams: Sequence[int], tell: Callable[[Json], None]
    ) -> Container:
        """Start a command beside the first process of a running container."""
        inside = self._inside[name]
        argv = [_volumes.rewrite(word, inside.paths) for word in words]
        return Container(Command(argv, inside.env, inside.cwd, streams=streams), tell)

    def all_beside(self) -> list[Container]:
        """Return all running commands that ``exec`` has started."""
        return [command for commands in self.beside.values() for command in commands]

    def message(self, container: Json, *, failed: bool) -> str:
        """Return the termination message: the file, or the end of the log if the policy says so."""
        path = self._folder / container["name"] / "termination"
        try:
            with open_regular(path) as file:  # the program may have put anything there
                text = file.read(MESSAGE_BYTES)
        except OSError:
            text = b""
        falls_back = container.get("terminationMessagePolicy") == "FallbackToLogsOnError"
        if failed and falls_back and not text:
            log = self.logs[container["name"]]
            count = len(log.times())
            entries = log.entries(max(0, count - 80), count)
            text = b"".join(entry for _, entry in entries)[-2048:]
        return str(text, errors="replace")

    def remove(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self._folder, ignore_errors=True)

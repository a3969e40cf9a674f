"""What became of a run's replicas, written down where it outlives the backend's own records."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from ._errors import SpecVersionError, UnavailableError
from ._handle import ReplicaHandle
from ._types import Reason, ReplicaState, ReplicaStatus

_VERSION = 1


@runtime_checkable
class RunJournal(Protocol):
    """Remembers launches and ends. An executor writes at launch, and when it first sees a terminal state. Thread-safe."""

    def record_launch(self, handles: list[ReplicaHandle]) -> None:
        """Remember the handles of a run; repeatable."""
        ...

    def record_end(self, handle: ReplicaHandle, status: ReplicaStatus, result: Any) -> None:
        """Remember a terminal status and the result; the first record of a replica stays."""
        ...

    def runs(self) -> list[str]:
        """The run_ids that have been launched."""
        ...

    def handles(self, run_id: str) -> list[ReplicaHandle]:
        """The handles of a run in rank order; empty if it is unknown."""
        ...

    def end(self, handle: ReplicaHandle) -> tuple[ReplicaStatus, Any] | None:
        """The terminal status and the result of a replica, if its end has been recorded."""
        ...


class FolderJournal:
    """A journal in a folder: one folder per run, one file per launch record and per end, each written in one step.

    Safe between threads and processes.

    Args:
        folder: Where; by default ``$XDG_STATE_HOME/diloco/journal`` (``~/.local/state`` where that is not set).
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder = Path(folder) if folder is not None else state_folder() / "journal"

    def record_launch(self, handles: list[ReplicaHandle]) -> None:
        """Remember the handles of a run; see :class:`RunJournal`."""
        for handle in handles:
            self._write(self._file(handle, "launched"), {"handle": handle.to_dict()}, replace=True)

    def record_end(self, handle: ReplicaHandle, status: ReplicaStatus, result: Any) -> None:
        """Remember a terminal status; see :class:`RunJournal`."""
        if not status.state.terminal:
            raise ValueError(f"only an end can be recorded, not {status.state}")
        record = {"handle": handle.to_dict(), "status": asdict(status), "result": result}
        self._write(self._file(handle, "ended"), record, replace=False)

    def runs(self) -> list[str]:
        """The known run_ids; see :class:`RunJournal`."""
        return sorted(path.name for path in self.folder.iterdir() if path.is_dir()) if self.folder.exists() else []

    def handles(self, run_id: str) -> list[ReplicaHandle]:
        """The handles of a run; see :class:`RunJournal`."""
        files = sorted((self.folder / run_id).glob("*.launched.json"))
        return sorted(
            (ReplicaHandle.from_dict(_read(file)["handle"]) for file in files), key=lambda handle: handle.rank
        )

    def end(self, handle: ReplicaHandle) -> tuple[ReplicaStatus, Any] | None:
        """The recorded end of a replica; see :class:`RunJournal`."""
        file = self._file(handle, "ended")
        if not file.exists():
            return None
        record = _read(file)
        if ReplicaHandle.from_dict(record["handle"]) != handle:
            return None  # a namesake: another run that was given the same run_id elsewhere
        status = dict(record["status"])
        status["state"] = ReplicaState(status["state"])
        status["reason"] = None if status["reason"] is None else Reason(status["reason"])
        return ReplicaStatus(**status), record["result"]

    def _file(self, handle: ReplicaHandle, what: str) -> Path:
        return self.folder / (handle.run_id or "unnamed") / f"{handle.backend_name}-{handle.rank:05}.{what}.json"

    def _write(self, path: Path, record: dict[str, Any], *, replace: bool) -> None:
        if not replace and path.exists():
            return
        partial = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps({"version": _VERSION, **record}), encoding="utf-8")
            partial.replace(path)
        except OSError as error:
            raise UnavailableError(f"the journal in {self.folder} cannot be written: {error}") from error


def state_folder() -> Path:
    """The folder for what this user's programs remember: ``$XDG_STATE_HOME/diloco`` or its usual place."""
    base = os.environ.get("XDG_STATE_HOME")
    if base:
        return Path(base) / "diloco"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "diloco"
    return Path.home() / ".local" / "state" / "diloco"


def _read(path: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if record.get("version") != _VERSION:
        raise SpecVersionError(f"{path} has version {record.get('version')!r}, this code reads {_VERSION}")
    return record

"""What became of a run's replicas, written down where it outlives the backend's own records."""

from __future__ import annotations

import os
import sys
import zlib
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from ._errors import InvalidRequestError, SpecVersionError, UnavailableError
from ._handle import ReplicaHandle
from ._json import check_json, dumps, loads
from ._private import check_private_folder, make_private_folder, read_private, write_private
from ._status_data import status_from_data, status_to_data

if TYPE_CHECKING:
    from pathlib import Path

    from ._types import ReplicaStatus

_VERSION = 2


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

    Names of runs and backends are spelled so that each is one file name, and no two are the same. The folder is this user's
    alone (0700, its files 0600), since whoever can write there says how replicas have ended.

    Safe between threads and processes.

    Args:
        folder: Where; by default ``$XDG_STATE_HOME/diloco/journal`` (``~/.local/state`` where that is not set).

    Raises:
        InvalidRequestError: The folder is another user's, or others can write to it. Every method raises this, too.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        from pathlib import Path  # slow to import, and replicas need none of it

        self.folder = Path(folder) if folder is not None else state_folder() / "journal"
        check_private_folder(self.folder)

    def __repr__(self) -> str:
        return f"FolderJournal({str(self.folder)!r})"

    def record_launch(self, handles: list[ReplicaHandle]) -> None:
        """Remember the handles of a run; see :class:`RunJournal`."""
        ranks = sorted(handle.rank for handle in handles)
        launch = f"{zlib.crc32(''.join(sorted(h.to_json() for h in handles)).encode()):08x}"
        for handle in handles:
            record = {"handle": handle.to_dict(), "launch": launch, "ranks": ranks}
            self._write(self._file(handle, "launched"), record, replace=True)

    def record_end(self, handle: ReplicaHandle, status: ReplicaStatus, result: Any) -> None:
        """Remember a terminal status; see :class:`RunJournal`."""
        if not status.state.terminal:
            raise InvalidRequestError(
                f"only the end of a replica can be recorded, and the state {str(status.state)!r} is not an end"
            )
        check_json(result, "result")
        record = {
            "handle": handle.to_dict(),
            "status": status_to_data(status),
            "result": result,
        }
        self._write(self._end_file(handle), record, replace=False)

    def runs(self) -> list[str]:
        """The known run_ids; see :class:`RunJournal`."""
        check_private_folder(self.folder)
        if not self.folder.exists():
            return []
        return sorted(_unspell(path.name) for path in self.folder.iterdir() if path.is_dir())

    def handles(self, run_id: str) -> list[ReplicaHandle]:
        """The handles of a run; see :class:`RunJournal`."""
        self._check(run_id)
        files = sorted((self.folder / _spell(run_id)).glob("*.launched.json"))
        launches: dict[str, list[dict[str, Any]]] = {}
        for record in map(_read_launch, files):
            launches.setdefault(record["launch"], []).append(record)
        # Of a launch whose name was used again, only the ranks are left that the later one does not have.
        whole = [
            records for records in launches.values() if len(records) == len(records[0]["ranks"])
        ]
        return sorted(
            (ReplicaHandle.from_dict(record["handle"]) for records in whole for record in records),
            key=lambda handle: handle.rank,
        )

    def end(self, handle: ReplicaHandle) -> tuple[ReplicaStatus, Any] | None:
        """The recorded end of a replica; see :class:`RunJournal`."""
        file = self._end_file(handle)
        if not file.exists():
            return None
        self._check(handle.run_id)
        record = _read(file, {"version", "handle", "status", "result"})
        if ReplicaHandle.from_dict(record["handle"]) != handle:
            return None  # a namesake: another run that was given the same run_id elsewhere
        return _status(record["status"], file), record["result"]

    def _check(self, run_id: str) -> None:
        check_private_folder(self.folder)
        check_private_folder(self.folder / _spell(run_id))

    def _file(self, handle: ReplicaHandle, what: str) -> Path:
        return (
            self.folder
            / _spell(handle.run_id)
            / f"{_spell(handle.backend_name)}-{handle.rank:05}.{what}.json"
        )

    def _end_file(self, handle: ReplicaHandle) -> Path:
        # Namesakes (the same run_id elsewhere) have ends of their own.
        return self._file(handle, f"{zlib.crc32(handle.to_json().encode()):08x}.ended")

    def _write(self, path: Path, record: dict[str, Any], *, replace: bool) -> None:
        partial = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
        try:
            make_private_folder(self.folder)
            make_private_folder(path.parent)
            write_private(partial, dumps({"version": _VERSION, **record}))
            if replace:
                partial.replace(path)
            else:
                _create(partial, path)
        except OSError as error:
            raise UnavailableError(
                f"the journal in {self.folder} cannot be written: {error}"
            ) from error


def _create(partial: Path, path: Path) -> None:
    """Let ``path`` be what ``partial`` is, unless it exists already: the first of several writers wins."""
    try:
        os.link(partial, path)
    except FileExistsError:
        pass
    except OSError:  # a file system without hard links
        if not path.exists():
            partial.replace(path)
            return
    partial.unlink()


def _spell(name: str) -> str:
    """A name as one file name: whatever is not a lower-case letter, digit or dash becomes ``%`` and its number."""
    plain = "abcdefghijklmnopqrstuvwxyz0123456789-_"
    return "".join(c if c in plain else f"%{ord(c):x}%" for c in name) or "%"


def _unspell(name: str) -> str:
    parts = name.split("%")
    return (
        ""
        if name == "%"
        else "".join(chr(int(p, 16)) if number % 2 else p for number, p in enumerate(parts))
    )


def state_folder() -> Path:
    """The folder in which programs of this user keep their state: ``$XDG_STATE_HOME/diloco`` or its usual place."""
    from pathlib import Path  # slow to import

    base = Path(os.environ.get("XDG_STATE_HOME", ""))
    if base.is_absolute():  # the XDG specification says that another path is to be ignored
        return base / "diloco"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "diloco"
    return Path.home() / ".local" / "state" / "diloco"


def _read(path: Path, names: set[str]) -> dict[str, Any]:
    try:
        record = loads(read_private(path), str(path))
    except UnicodeDecodeError as error:
        raise _damaged(path, str(error)) from error
    except OSError as error:
        raise UnavailableError(f"the journal's record {path} cannot be read: {error}") from error
    version = record.get("version") if isinstance(record, dict) else None
    if version != _VERSION:
        raise SpecVersionError(
            f"{path} has version {version!r}, and this diloco-protocol reads version {_VERSION}"
        )
    if record.keys() != names:
        raise _damaged(path, f"it has the fields {sorted(record)} instead of {sorted(names)}")
    return dict(record)


def _read_launch(path: Path) -> dict[str, Any]:
    record = _read(path, {"version", "handle", "launch", "ranks"})
    if type(record["launch"]) is not str or not (
        type(record["ranks"]) is list and all(type(rank) is int for rank in record["ranks"])
    ):
        raise _damaged(path, "launch is not text, or ranks are not numbers")
    return record


def _status(data: Any, path: Path) -> ReplicaStatus:
    try:
        status = status_from_data(data)
    except InvalidRequestError as error:
        raise _damaged(path, str(error)) from None
    if not status.state.terminal:
        raise _damaged(path, f"the state {status.state.value!r} is not an end")
    return status


def _damaged(path: Path, why: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"the journal's record {path} is damaged: {why}. Without the file, the backend is asked again"
    )

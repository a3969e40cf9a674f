"""A journal of how a run's replicas ended, which outlives the backend's own records."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import zlib
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from ._bounds import OUTCOME_BYTES, RECORD_BYTES, check_size
from ._checks import check_home, shown
from ._errors import DilocoError, InvalidRequestError, SpecVersionError, UnavailableError
from ._fields import check_version
from ._handle import ReplicaHandle
from ._json import check_json, dumps, loads
from ._private import check_private_folder, make_private_folder, read_private, write_private
from ._status_data import status_from_data, status_to_data

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ._types import ReplicaStatus

_VERSION = 3
_LAUNCHED, _ENDED = ".launched.json", ".ended.json"
_SPELLED = re.compile("%([0-9a-f]{1,6})%")
_LONGEST_NAME = 200  # file systems take 255 bytes


class DamagedRecordError(InvalidRequestError):
    """Raised when a record of a journal cannot be read.

    It concerns one replica or the launches of one run, and no others.
    """


@runtime_checkable
class RunJournal(Protocol):
    """A store that remembers launches and ends.

    An executor writes into it at a launch, and when it first sees a terminal state. Thread-safe.

    Records belong to a place as it is written in the handle. A cluster that is reached at two
    addresses, or a folder by two paths, counts as two places: use one of them for one journal.
    """

    def record_launch(self, handles: list[ReplicaHandle]) -> None:
        """Remember the handles of a run; repeatable."""
        ...

    def record_end(self, handle: ReplicaHandle, status: ReplicaStatus, result: Any) -> None:
        """Remember a terminal status and the result; the first record of a replica stays."""
        ...

    def runs(self) -> list[str]:
        """Return the run_ids that have been launched."""
        ...

    def handles(
        self, run_id: str, wanted: Callable[[ReplicaHandle], bool] | None = None
    ) -> list[ReplicaHandle]:
        """Return the handles of a run in rank order; empty if the run is unknown.

        If a rank was launched several times, only the handle of its latest launch is returned.

        Args:
            run_id: Name of the run.
            wanted: Says whether a handle counts. Launches of the same name elsewhere, which it does
                not want, do not hide those that it wants.

        Raises:
            InvalidRequestError: A record of a launch of this run is damaged.
        """
        ...

    def end(self, handle: ReplicaHandle) -> tuple[ReplicaStatus, Any] | None:
        """Return the terminal status and the result of a replica, if its end has been recorded.

        Raises:
            InvalidRequestError: The record of this replica is damaged.
        """
        ...


class FolderJournal:
    """A journal in a folder.

    There is one folder per run, and one file per launch and per end, each written in one step. The
    names of runs and backends are escaped so that each is one valid file name, and no two are the
    same. The folder belongs to this user alone (mode 0700, its files 0600), since everyone who can
    write there can decide how replicas have ended.

    Safe to use from several threads and processes.

    Args:
        folder: The folder; ``~`` and ``~user`` at the beginning are home folders. By default
            ``$XDG_STATE_HOME/diloco/journal`` (``~/.local/state`` where that is not set).

    Raises:
        InvalidRequestError: The folder is not a path, or belongs to another user, or others can
            write to it. Every method raises this, too.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        from pathlib import Path  # slow to import, and replicas do not need it

        self.folder = (
            state_folder() / "journal" if folder is None else Path(check_home("folder", folder))
        )
        check_private_folder(self.folder)

    def __repr__(self) -> str:
        return f"FolderJournal({str(self.folder)!r})"

    def record_launch(self, handles: list[ReplicaHandle]) -> None:
        """Remember the handles of a run; see :class:`RunJournal`."""
        if not handles:
            return
        import hashlib  # slow to import

        record = {"handles": [handle.to_dict() for handle in sorted(handles, key=_rank)]}
        digest = hashlib.sha256(dumps(record).encode()).hexdigest()[:16]
        folder = self._folder(handles[0].run_id)
        earlier = self._launches(folder)
        if earlier and earlier[-1].name.endswith(f".{digest}{_LAUNCHED}"):
            with contextlib.suppress(DamagedRecordError, SpecVersionError):
                _read_launch(earlier[-1])
                return  # it is the latest launch of this run anyway
        number = 1 + max((_number(path) for path in earlier), default=0)
        self._write(folder / f"{number:06}.{digest}{_LAUNCHED}", record, RECORD_BYTES, replace=True)
        for path in earlier:  # earlier records of the same launch
            if path.name.endswith(f".{digest}{_LAUNCHED}"):
                with contextlib.suppress(OSError):
                    path.unlink()

    def record_end(self, handle: ReplicaHandle, status: ReplicaStatus, result: Any) -> None:
        """Remember a terminal status; see :class:`RunJournal`."""
        if not status.state.terminal:
            raise InvalidRequestError(
                f"only the end of a replica can be recorded, and the state {str(status.state)!r} "
                "is not an end"
            )
        check_json(result, "result")
        record = {
            "handle": handle.to_dict(),
            "status": status_to_data(status),
            "result": result,
        }
        self._write(self._end_file(handle), record, OUTCOME_BYTES, replace=False)

    def runs(self) -> list[str]:
        """Return the known run_ids; see :class:`RunJournal`."""
        check_private_folder(self.folder)
        with self._reading():
            if not self.folder.exists():
                return []
            names = [_unspell(path.name) for path in self.folder.iterdir() if path.is_dir()]
        return sorted(name for name in names if name is not None)

    def handles(
        self, run_id: str, wanted: Callable[[ReplicaHandle], bool] | None = None
    ) -> list[ReplicaHandle]:
        """Return the handles of a run; see :class:`RunJournal`."""
        if len(_spell(run_id)) > _LONGEST_NAME:
            return []
        folder = self._folder(run_id)
        found: list[ReplicaHandle] = []
        taken: set[tuple[str, int]] = set()
        for path in reversed(self._launches(folder)):
            launch = list(filter(wanted, _read_launch(path)))
            places = set(map(_place, launch))
            # A launch no longer counts when a later launch has taken one of its ranks.
            if taken.isdisjoint(places):
                found += launch
            taken |= places
        return sorted(found, key=_rank)

    def end(self, handle: ReplicaHandle) -> tuple[ReplicaStatus, Any] | None:
        """Return the recorded end of a replica; see :class:`RunJournal`."""
        file = self._end_file(handle)
        with self._reading():
            if not file.exists():
                return None
        check_private_folder(self.folder)
        check_private_folder(file.parent)
        record = _read(file, OUTCOME_BYTES, {"version", "handle", "status", "result"})
        try:
            found = ReplicaHandle.from_dict(record["handle"])
            status = status_from_data(record["status"])
        except DilocoError as error:
            raise _damaged(file, str(error)) from None
        if found != handle:
            return None  # the end of another run, which got the same run_id elsewhere
        if not status.state.terminal:
            raise _damaged(file, f"the state {status.state.value!r} is not an end")
        return status, record["result"]

    def _folder(self, run_id: str) -> Path:
        name = _spell(run_id)
        if len(name) > _LONGEST_NAME:
            raise InvalidRequestError(f"a journal has no run of so long a name as {shown(run_id)}")
        return self.folder / name

    def _launches(self, folder: Path) -> list[Path]:
        """Return the records of the launches of a run, the latest at the end."""
        check_private_folder(self.folder)
        check_private_folder(folder)
        with self._reading():
            found = list(folder.glob(f"*{_LAUNCHED}"))
        return sorted(found, key=lambda path: (_number(path), path.name))

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UnavailableError(
                f"the journal in {self.folder} cannot be read: {error}"
            ) from error

    def _end_file(self, handle: ReplicaHandle) -> Path:
        # Runs with the same run_id elsewhere have ends of their own, so the handle is in the name.
        checksum = zlib.crc32(handle.to_json().encode())
        backend = _spell(handle.backend_name)[:_LONGEST_NAME]
        return self._folder(handle.run_id) / f"{backend}-{handle.rank:05}.{checksum:08x}{_ENDED}"

    def _write(self, path: Path, record: dict[str, Any], most: int, *, replace: bool) -> None:
        text = dumps({"version": _VERSION, **record})
        check_size(f"the journal's record {path}", len(text), most)
        partial = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
        try:
            make_private_folder(self.folder)
            make_private_folder(path.parent)
            write_private(partial, text)
            if replace:
                partial.replace(path)
            else:
                _create(partial, path)
        except OSError as error:
            raise UnavailableError(
                f"the journal in {self.folder} cannot be written: {error}"
            ) from error
        finally:  # do not fill the disk with partial files
            with contextlib.suppress(OSError):
                partial.unlink()


def _create(partial: Path, path: Path) -> None:
    """Create ``path`` from ``partial`` unless it exists: the first of several writers wins."""
    try:
        os.link(partial, path)
    except FileExistsError:
        pass
    except OSError:  # a file system without hard links
        if not path.exists():
            partial.replace(path)


def _spell(name: str) -> str:
    """Return a name as one file name.

    Every character that is not a lower-case letter, digit, dash or underscore becomes its number
    between two ``%``.
    """
    if not isinstance(name, str):
        raise InvalidRequestError(f"the name of a run must be text, not {shown(name)}")
    plain = "abcdefghijklmnopqrstuvwxyz0123456789-_"
    return "".join(c if c in plain else f"%{ord(c):x}%" for c in name) or "%"


def _unspell(name: str) -> str | None:
    """Return the name that a file name stands for; None for a folder that no run has made."""
    try:
        text = "" if name == "%" else _SPELLED.sub(lambda match: chr(int(match[1], 16)), name)
    except (ValueError, OverflowError):
        return None
    return text if _spell(text) == name else None


def _number(path: Path) -> int:
    """Return the number of a launch; the latest launch of a run has the largest."""
    number = path.name.partition(".")[0]
    return int(number) if number.isascii() and number.isdecimal() and len(number) <= 9 else 0


def _rank(handle: ReplicaHandle) -> int:
    return handle.rank


def _place(handle: ReplicaHandle) -> tuple[str, int]:
    return handle.backend_name, handle.rank


def state_folder() -> Path:
    """Return the folder in which programs of this user keep their state.

    It is ``$XDG_STATE_HOME/diloco``, or its usual place where that is not set.

    Raises:
        InvalidRequestError: The folder would be in the home folder, and there is none.
    """
    from pathlib import Path  # slow to import

    base = Path(os.environ.get("XDG_STATE_HOME", ""))
    if base.is_absolute():  # the XDG specification says that relative paths must be ignored
        return base / "diloco"
    if sys.platform == "darwin":
        return Path(check_home("folder", "~/Library/Application Support/diloco"))
    return Path(check_home("folder", "~/.local/state/diloco"))


def _read(path: Path, most: int, names: set[str]) -> dict[str, Any]:
    try:
        record = check_version(str(path), loads(read_private(path, most), str(path)), _VERSION)
    except UnicodeDecodeError as error:
        raise _damaged(path, str(error)) from error
    except InvalidRequestError as error:
        raise DamagedRecordError(str(error)) from None
    except OSError as error:
        raise UnavailableError(f"the journal's record {path} cannot be read: {error}") from error
    if record.keys() != names:
        raise _damaged(
            path, f"it has the fields {shown(sorted(record))} instead of {sorted(names)}"
        )
    return record


def _read_launch(path: Path) -> list[ReplicaHandle]:
    record = _read(path, RECORD_BYTES, {"version", "handles"})
    if type(record["handles"]) is not list:
        raise _damaged(path, "handles is not a list")
    try:
        handles = [ReplicaHandle.from_dict(handle) for handle in record["handles"]]
    except DilocoError as error:
        raise _damaged(path, str(error)) from None
    if len(set(map(_place, handles))) != len(handles):
        raise _damaged(path, "it has a rank twice")
    return handles


def _damaged(path: Path, why: str) -> DamagedRecordError:
    return DamagedRecordError(
        f"the journal's record {path} is damaged: {why}. Without the file, the backend is asked "
        "again"
    )

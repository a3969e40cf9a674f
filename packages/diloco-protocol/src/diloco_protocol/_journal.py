"""Journals of how a run's replicas ended, which outlive the backend's own records."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Protocol, TypeVar, runtime_checkable

from . import _journal_records as records
from ._collect import RESULT_LOST
from ._errors import BackendError, InvalidRequestError, SpecVersionError, UnavailableError
from ._journal_records import DamagedRecordError, Launch
from ._json import RESULT_BYTES, dumps
from ._redact import redact_json, redact_text
from ._request import is_run_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from ._handle import ReplicaHandle
    from ._types import ReplicaStatus

T = TypeVar("T")

MOST_KEYS = 200_000
"""The most keys of one listing that are looked at."""
MOST_BYTES = 64 * 1024 * 1024
"""After so many bytes of records, one look at a run reads no further one."""


@runtime_checkable
class RunJournal(Protocol):
    """A store that remembers launches and ends.

    An executor writes into it at a launch, and when it first sees a terminal state. Thread-safe.

    Records belong to a place as it is written in the handle. A cluster that is reached at two
    addresses, or a folder by two paths, counts as two places: use one of them for one journal.

    A journal may also have the attribute ``believed``, which is False if others can write there:
    then an end counts only where the backend has no record of the replica. And it may have the
    methods ``keep_log(handle, text)`` and ``log(handle)``, which remember the end of a log.
    """

    def record_launch(
        self, handles: list[ReplicaHandle], options: Mapping[str, Any] | None = None
    ) -> None:
        """Remember the handles of a run, and what the launch asked for; repeatable."""
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


def _refuse(*_: object) -> NoReturn:
    raise InvalidRequestError("this journal can only be read")


def is_believed(journal: RunJournal | None) -> bool:
    """Return whether only those whom the launcher trusts can write into a journal."""
    return journal is not None and bool(getattr(journal, "believed", True))


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """The records that a journal has of a run.

    Attributes:
        run_id: Name of the run.
        launches: Its launches, the latest first.
        handles: The replicas, in rank order.
        ends: The ends that are known, each with the result.
        logged: The replicas of which the end of the log is kept.
        skipped: How many objects were not such records.
        left_out: How many records were not read since there are too many.
    """

    run_id: str
    launches: tuple[Launch, ...]
    handles: tuple[ReplicaHandle, ...]
    ends: Mapping[ReplicaHandle, tuple[ReplicaStatus, Any]]
    logged: frozenset[ReplicaHandle]
    skipped: int
    left_out: int


class StoreJournal:
    """A journal in a store that others can write to, over five functions of the store.

    There is one folder per run (``run-1/``), and one object per launch, per end and per log. The
    replicas of a run can write where they meet, so these records are the word of strangers. An
    executor asks its backend first, and an end counts only where the backend has no record of the
    replica. Where a record contradicts the backend, it is replaced. What is damaged is skipped.
    Messages and results are written without what looks like a secret; an executor hands over the
    options of a launch, and logs, without it.

    Keys are relative, such as ``"run-1/eks-00003.5d1f0a2b.ended.json"``. The functions may be
    called from several threads. Any exception that they raise means that the store cannot be
    reached.

    Args:
        where: The place of the journal, for messages, such as ``"s3://bucket/run-1/journal"``.
        list_keys: ``list_keys(folder)`` yields the keys of all objects below a folder (``""`` or
            ``"run-1/"``), and none if there is no such folder. Of a folder in it, one key that ends
            in ``/`` is enough.
        read: ``read(key, most)`` returns at most so many bytes of an object from its beginning, all
            of it if it has fewer, and None if there is no such object.
        put: ``put(key, data)`` writes an object in one step, and replaces one that exists. Without
            this function and the next two, the journal can only be read.
        create: ``create(key, data)`` writes an object in one step unless the key exists, and
            returns whether this call wrote it.
        delete: ``delete(key)`` removes an object, if it exists.
    """

    believed: ClassVar[bool] = False

    def __init__(
        self,
        where: str,
        *,
        list_keys: Callable[[str], Iterable[str]],
        read: Callable[[str, int], bytes | None],
        put: Callable[[str, bytes], object] = _refuse,
        create: Callable[[str, bytes], bool] = _refuse,
        delete: Callable[[str], object] = _refuse,
    ) -> None:
        self._where = where
        self._list_keys, self._read = list_keys, read
        self._put, self._create, self._delete = put, create, delete

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._where!r})"

    def record_launch(
        self, handles: list[ReplicaHandle], options: Mapping[str, Any] | None = None
    ) -> None:
        """Remember the handles of a run; see :class:`RunJournal`."""
        if not handles:
            return
        launch, digest, record = records.launch_record(handles, options)
        folder = records.folder_of(launch.handles[0].run_id)
        earlier = records.launches_in(self._listed(folder))
        same = [folder + name for name in earlier if name.endswith(f".{digest}{records.LAUNCHED}")]
        if same and same[-1] == folder + earlier[-1]:
            with contextlib.suppress(DamagedRecordError, SpecVersionError):
                last_launch = self._parsed(same[-1], records.read_launch)
                if last_launch is not None and last_launch.handles == launch.handles:
                    return  # it is the latest launch of this run anyway
        key = folder + records.next_name(earlier, digest)
        self._do("written", partial(self._put, key, self._encoded(key, record)))
        for old_key in set(same) - {key}:
            with contextlib.suppress(UnavailableError):
                self._do("written", partial(self._delete, old_key))

    def record_end(self, handle: ReplicaHandle, status: ReplicaStatus, result: Any) -> None:
        """Remember a terminal status; see :class:`RunJournal`."""
        if not self.believed:
            status, result = _without_secrets(status, redact_json(result))
        key = records.key_of(handle, records.ENDED)
        data = self._encoded(key, records.end_record(handle, status, result))
        if self._do("written", partial(self._create, key, data)) or self.believed:
            return
        if self._bytes(key, len(data) + 1) != data:
            self._do("written", partial(self._put, key, data))

    def keep_log(self, handle: ReplicaHandle, text: str) -> None:
        """Remember the end of a log, of at most a MiB; an earlier one is replaced."""
        key = records.key_of(handle, records.LOGGED)
        data = self._encoded(key, records.log_record(handle, text))
        self._do("written", partial(self._put, key, data))

    def runs(self) -> list[str]:
        """Return the known run_ids; see :class:`RunJournal`."""
        names = [name[:-1] for name in self._listed("") if name.endswith("/")]
        return sorted(filter(is_run_id, names))

    def handles(
        self, run_id: str, wanted: Callable[[ReplicaHandle], bool] | None = None
    ) -> list[ReplicaHandle]:
        """Return the handles of a run; see :class:`RunJournal`."""
        if isinstance(run_id, str) and not is_run_id(run_id):
            return []  # others than texts are refused
        folder = records.folder_of(run_id)
        tally = None if self.believed else _Tally()
        launches = self._launches(folder, self._listed(folder), tally)
        return [handle for handle in records.current(launches, wanted) if handle.run_id == run_id]

    def end(self, handle: ReplicaHandle) -> tuple[ReplicaStatus, Any] | None:
        """Return the recorded end of a replica; see :class:`RunJournal`."""
        return self._parsed(
            records.key_of(handle, records.ENDED), partial(records.read_end, handle)
        )

    def log(self, handle: ReplicaHandle) -> str | None:
        """Return the end of a replica's log, if it is kept; the text is what the replica wrote.

        Raises:
            DamagedRecordError: The record is damaged.
        """
        return self._parsed(
            records.key_of(handle, records.LOGGED), partial(records.read_log, handle)
        )

    def look(self, run_id: str) -> RecordedRun:
        """Return what there is of a run: one listing, and one read for each launch and end.

        Records that are damaged are skipped and counted. None is read after the first 64 MiB.
        """
        folder, tally = records.folder_of(run_id), _Tally()
        names = self._listed(folder)
        launches = self._launches(folder, names, tally)
        handles = [handle for handle in records.current(launches, None) if handle.run_id == run_id]
        keys = {folder + name for name in names}
        ends = {}
        for handle in handles:
            key = records.key_of(handle, records.ENDED)
            end = (
                self._parsed(key, partial(records.read_end, handle), tally) if key in keys else None
            )
            if end is not None:
                ends[handle] = end
        return RecordedRun(
            run_id=run_id,
            launches=tuple(launches),
            handles=tuple(handles),
            ends=ends,
            logged=frozenset(
                replica for replica in handles if records.key_of(replica, records.LOGGED) in keys
            ),
            skipped=tally.skipped + sum(not name.endswith(records.KINDS) for name in names),
            left_out=tally.left_out,
        )

    def _listed(self, folder: str) -> set[str]:
        """Return the names of what is directly in a folder; those of folders end in a slash."""
        keys = self._do("read", lambda: list(islice(self._list_keys(folder), MOST_KEYS)))
        parts = (key[len(folder) :].partition("/") for key in keys if key.startswith(folder))
        return {name + slash for name, slash, _ in parts}

    def _launches(self, folder: str, names: Iterable[str], tally: _Tally | None) -> list[Launch]:
        """Return the launches of a run, the latest first."""
        keys = [folder + name for name in reversed(records.launches_in(names))]
        results = [self._parsed(key, records.read_launch, tally) for key in keys]
        if tally is None and None in results:
            key = keys[results.index(None)]
            raise UnavailableError(f"the journal's {self._path(key)} cannot be read: it is gone")
        return [launch for launch in results if launch is not None]

    def _parsed(
        self, key: str, parse: Callable[[bytes, str], T | None], tally: _Tally | None = None
    ) -> T | None:
        """Return what a record says, if it exists; with a tally, a damaged one is only counted."""
        if tally is not None and tally.size > MOST_BYTES:
            tally.left_out += 1
            return None
        data = self._bytes(key, records.most_of(key) + 1)
        if data is None:
            return None
        try:
            return parse(data, self._path(key))
        except (DamagedRecordError, SpecVersionError):
            if tally is None:
                raise
            tally.skipped += 1
            return None
        finally:
            if tally is not None:
                tally.size += len(data)

    def _encoded(self, key: str, record: dict[str, Any]) -> bytes:
        return records.to_bytes(record, self._path(key), records.most_of(key))

    def _bytes(self, key: str, most: int) -> bytes | None:
        return self._do("read", partial(self._read, key, most))

    def _path(self, key: str) -> str:
        return f"{self._where}/{key}"

    def _do(self, verb: str, act: Callable[[], T]) -> T:
        try:
            return act()
        except BackendError:
            raise
        except Exception as error:
            why = error if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            raise UnavailableError(
                f"the journal in {self._where} cannot be {verb}: {why}"
            ) from error


@dataclass(slots=True)
class _Tally:
    """What one look at records has read, and what it has passed over."""

    size: int = 0
    skipped: int = 0
    left_out: int = 0


def _without_secrets(status: ReplicaStatus, result: Any) -> tuple[ReplicaStatus, Any]:
    """Return an end as a store holds it; ``result`` is already without secrets."""
    url = None if status.url is None else redact_text(status.url)
    message, native = redact_text(status.message), redact_text(status.native)
    if len(dumps(result)) > RESULT_BYTES:  # the marks may be longer than what they hide
        message = f"{RESULT_LOST}without its secrets it has more than {RESULT_BYTES} bytes of JSON"
        result = None
    return replace(status, message=message, native=native, url=url), result

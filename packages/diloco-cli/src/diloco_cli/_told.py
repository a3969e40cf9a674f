"""Read what a run's store tells, on any machine: for ``status URI`` and for other verbs.

The store is read through fsspec, which is imported when it is opened.

The replicas tell what they do. The journal there says what an executor has recorded, or a stranger:
it is bounded, shown as what the journal says, and never above what a backend says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mode
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from diloco_protocol import (
    InvalidRequestError,
    MissingDependencyError,
    RecordedRun,
    ReplicaHandle,
    ReplicaNotFoundError,
    ReplicaStatus,
    SpecVersionError,
    StoreJournal,
    UnavailableError,
)
from diloco_protocol.backend import redact_json, shown
from diloco_protocol.telemetry import Live, RunReader, Told, find_runs

from . import _facts
from ._backends import Run
from ._facts import ENDS, SUCCEEDED, Cell, exit_of_states, place_of, table
from ._session import Screen, Session
from ._texts import CLOCK, clean, in_ranges, ranks_in_words
from ._view import COLUMNS, rank_facts, see

T = TypeVar("T")

_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure"}
# What changes whenever an object is written again, by the names that drivers give it.
_STAMPS = ("ETag", "etag", "generation", "mtime", "LastModified", "last_modified", "created")
_FOLDER = "journal/"
NOTHING = Told(live={}, history={}, skipped=0, of_another_version=0, left_out=0)
"""What is told by no replica."""
_MOST_RANKS = 100_000  # as replicas may tell
_MOST_RUNS, _MOST_LAUNCHES = 16, 64  # that are read, and that are shown
_UNREAD = {
    "skipped": "are not what a replica tells",
    "of_another_version": "are of another version",
    "left_out": "were not read: there are too many",
}


class Store:
    """The objects below a prefix. It only reads, and raises errors of the protocol alone.

    Args:
        uri: The prefix: a folder, ``s3://…``, or whatever fsspec has a driver for.

    Raises:
        InvalidRequestError: It is not such a prefix.
        MissingDependencyError: The driver is not installed.
    """

    def __init__(self, uri: str) -> None:
        scheme, separator, rest = uri.partition("://")
        if "::" in uri or (separator and scheme != "file" and "@" in rest.partition("/")[0]):
            raise InvalidRequestError(
                f"{uri} is not the URI of a run: give a folder, or a prefix such as "
                "s3://bucket/run-1; user and password come from the driver's own chain"
            )
        import fsspec
        from fsspec.implementations.local import LocalFileSystem

        options = {"skip_instance_cache": True, "use_listings_cache": False}
        try:
            self._fs, root = fsspec.core.url_to_fs(uri, **({} if scheme == "memory" else options))
        except ImportError as error:
            extra = _EXTRAS.get(scheme)
            hint = f": pip install 'diloco-cli[{extra}]'" if extra else f" ({error})"
            raise MissingDependencyError(
                f"the driver for {scheme}:// is not installed here{hint}"
            ) from None
        except ValueError as error:
            raise InvalidRequestError(f"{uri} cannot be opened: {error}") from None
        self.uri, self._root = uri.rstrip("/"), root.rstrip("/")
        # In a folder, links could lead in circles. Elsewhere a depth would take more requests.
        self._depth = {"maxdepth": 2} if isinstance(self._fs, LocalFileSystem) else {}
        self._empty: dict[str, bool] = {}

    def list_keys(self, folder: str) -> Iterator[tuple[str, object]]:
        """Yield the keys below a folder, each with what changes if it is written again."""
        path = self._path(folder)
        objects = self._do(lambda: self._fs.find(path, detail=True, **self._depth)) or {}
        for name, info in objects.items():
            key, is_link = name[len(self._root) + 1 :], bool(info.get("islink"))
            # A link is not followed, and an empty object has no first byte to ask for.
            self._empty[key] = is_link or info.get("type") != "file" or not info.get("size")
            stamps = [info[field] for field in _STAMPS if info.get(field) is not None]
            yield key, (*stamps, info.get("size")) if stamps else None

    def read(self, key: str, most: int) -> bytes | None:
        """Return so many bytes of an object from its beginning; None if there is none."""
        if self._empty.get(key):
            return b""
        data = self._do(lambda: self._fs.cat_file(self._path(key), start=0, end=most))
        return None if data is None else bytes(data[:most])

    def names(self, folder: str) -> list[str]:
        """Return the names of what is directly in a folder."""
        paths = self._do(lambda: self._fs.ls(self._path(folder), detail=False)) or []
        return [name.rstrip("/").rpartition("/")[2] for name in paths]

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}".rstrip("/")

    def _do(self, act: Callable[[], T]) -> T | None:
        try:
            return act()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None
        except Exception as error:  # noqa: BLE001 - drivers raise errors of their own
            raise UnavailableError(
                f"{self.uri} cannot be read: {type(error).__name__}: {error}"
            ) from None


def is_uri(run: str) -> bool:
    """Return whether what was given is the URI or folder of a run, and not its name."""
    return "/" in run or run in {".", ".."}


def spelling(uri: str) -> str | None:
    """Return a place in one spelling, as diloco-core compares them; None for a relative path.

    >>> spelling("fsspec+s3://bucket/run-1/"), spelling("file:///a/b/"), spelling("b")
    ('s3://bucket/run-1', '/a/b', None)
    """
    scheme, separator, rest = uri.partition("://")
    if separator and scheme != "file":
        return f"{scheme.rpartition('+')[2]}://{rest.rstrip('/')}"
    path = Path(unquote(urlsplit(uri).path) if separator else uri)
    return str(path) if path.is_absolute() else None


def store_of(run: Run) -> Store:
    """Return the store where a run meets, as its backend says.

    Raises:
        InvalidRequestError: It names none, or a path that only the launch knows.
        BackendError: The backend could not be asked.
    """
    uri = run.executor.meets_at(run.handles[0])  # as all of its launch
    if not uri or (place := spelling(uri)) is None:
        said = f"the relative path {shown(uri)}" if uri else "no place"
        raise InvalidRequestError(f"the launch of {run.run_id} names {said} to meet at")
    return Store(place)


def status(session: Session, uri: str) -> int:
    """Print what every replica of a run has told last, or the runs below a prefix.

    Returns the exit code. How a replica ended is what the journal there says, or else the replica
    itself; one of which neither says it counts as one that runs.

    Raises:
        ReplicaNotFoundError: There is no run, or neither its replicas nor a journal tell of it.
        SpecVersionError: They are of another version.
        UnavailableError: The store cannot be read.
    """
    session.ask_no_backend()
    screen = session.screen
    store, runs = _open(uri)
    if runs != [""]:
        uris = [clean(f"{uri.rstrip('/')}/{name}") for name in runs]
        if session.as_json:
            screen.json({"uri": clean(uri), "runs": uris})
        else:
            screen.say(f"there are runs below {clean(uri)}:")
            screen.lines([Cell(text)] for text in uris)
        return SUCCEEDED
    telemetry, recorded = read_run(store, history=False)
    facts = run_facts(uri, telemetry, list(recorded.handles.values()))
    facts["journal"] = recorded.facts() if recorded.runs else None
    if session.as_json:
        screen.json(facts)
    else:
        _show(screen, facts, session.clock())
    return exit_of_states(_states(facts))


def open_run(uri: str) -> Store:
    """Return the store of a run.

    Raises:
        InvalidRequestError: There are several runs below this prefix; the error names some.
        ReplicaNotFoundError: There is no run.
        UnavailableError: The store cannot be read.
    """
    store, runs = _open(uri)
    if runs != [""]:
        raise InvalidRequestError(
            f"there are runs below {uri}, such as {', '.join(runs[:10])}: give the URI of one"
        )
    return store


def _open(uri: str) -> tuple[Store, list[str]]:
    """Return a store and the names of the runs in it; that of a run itself is empty."""
    store = Store(uri)
    if not (runs := find_runs(store.names)):
        raise ReplicaNotFoundError(f"there is no run in {uri}, nor directly below it")
    return store, runs


def check_version(uri: str, told: Told) -> None:
    """Check that a replica, if any has told something, is of this version.

    Raises:
        SpecVersionError: All that have told something are of another version.
    """
    if not told.live and told.of_another_version:
        raise SpecVersionError(
            f"the replicas of {uri} are of another version of diloco: use the diloco-cli of theirs"
        )


def read_run(store: Store, *, history: bool = True) -> tuple[Told, Recorded]:
    """Return what the replicas of a run have told so far, and what the journal in its store says.

    Raises:
        ReplicaNotFoundError: Neither its replicas nor a journal tell of it.
        SpecVersionError: They are of another version.
        UnavailableError: The store cannot be read.
    """
    telemetry = RunReader(store.list_keys, store.read).look(history=history)
    recorded = Recorded(store, telemetry.live)
    if not recorded.handles:
        check_version(store.uri, telemetry)
    if not telemetry.live and not recorded.handles:
        raise ReplicaNotFoundError(
            f"the replicas of {store.uri} have told nothing: have they begun, without telemetry?"
        )
    return telemetry, recorded


def run_facts(uri: str, told: Told, handles: Sequence[ReplicaHandle] = ()) -> dict[str, Any]:
    """Return the facts about a run as a JSON value.

    What is said of the whole run is what most ranks say, or the replicas where no rank says it.
    """
    lives = [told.live[rank] for rank in sorted(told.live)]
    world_size = mode([replica.world_size for replica in lives or handles] or [0])
    names = [live.run for live in lives] or [handle.run_id for handle in handles] or [""]
    ranks = [*told.live, *(key.rank for key in told.history), *(rank for rank, _ in told.ends)]
    replicas = [
        _facts.plain(redact_json({name: getattr(live, name) for name in _facts.NAMES}))
        for live in lives
        if live.rank < world_size
    ]
    return {
        "uri": clean(uri),
        "run_id": clean(mode(names)),
        "world_size": world_size,
        "sync": max((replica["sync"] for replica in replicas), default=0),
        "replicas": replicas,
        "silent": sorted(set(range(world_size)) - {live.rank for live in lives}),
        "skipped": told.skipped + sum(rank >= world_size > 0 for rank in ranks),
        "of_another_version": told.of_another_version,
        "left_out": told.left_out,
    }


def _states(facts: dict[str, Any]) -> list[str]:
    """Return the state of every rank: as the journal says, or else as the rank itself does."""
    states = dict.fromkeys(facts["silent"], "unknown")
    states |= {row["rank"]: ENDS.get(row["ended"], "unknown") for row in facts["replicas"]}
    states |= {end["rank"]: end["state"] for end in (facts["journal"] or {}).get("ends", ())}
    return list(states.values())


def _show(screen: Screen, facts: dict[str, Any], now: float) -> None:
    seen = see({}, facts["replicas"], now, None)
    rows = [rank_facts(rank, entry, None, now, math.inf) for rank, entry in seen.items()]
    rows = [{**row, "state": row["state"] or "running"} for row in rows]
    run = f"run {facts['run_id']}, " if facts["run_id"] else ""
    states = _facts.counts_in_words(_facts.counts(_states(facts)))
    screen.line(f"{facts['uri']}: {run}{states}, sync {facts['sync']}")
    screen.lines(table(COLUMNS, rows, now, screen.width))
    journal = facts["journal"] or {"ends": (), "disproved": (), "skipped": 0, "left_out": 0}
    ended = {end["rank"] for end in journal["ends"]}
    screen.lines([Cell(text)] for text in _facts.said(r for r in rows if r["rank"] not in ended))
    if facts["silent"]:
        screen.line(f"silent so far: {ranks_in_words(facts['silent'])}")
    for note in unread(facts):
        screen.say(note)
    if ends := journal["ends"]:
        screen.line("ended, as the journal in the store says:")
        screen.lines(_facts.replica_lines(ends, now, screen.width))
    if ranks := journal["disproved"]:
        screen.say(f"ended by the journal, and have told something since: {in_ranges(ranks)}")
    if count := journal["skipped"] + journal["left_out"]:
        screen.say(f"objects of the journal that are no records, or too many: {count}")


def unread(facts: Mapping[str, Any]) -> list[str]:
    """Return what was not read of a run, in sentences."""
    return [f"objects that {text}: {facts[name]}" for name, text in _UNREAD.items() if facts[name]]


class Recorded:
    """The records of the journal in a store about the ranks of its run.

    Args:
        store: The store.
        told: What the ranks themselves tell. The records of the launch that a rank names count;
            where it names none, those of the launch of which a replica ended last.

    Attributes:
        runs: The records of its runs.
        handles: The replica that counts for each rank, in rank order.
        ends: How these have ended, as far as that is recorded.
        disproved: Ranks that have told something after their recorded end, which does not count.
        skipped: How many objects and replicas are not such records.
        left_out: How many records or runs were not read since there are too many.

    Raises:
        UnavailableError: The store cannot be read.
    """

    def __init__(self, store: Store, told: Mapping[int, Live]) -> None:
        self._journal = StoreJournal(
            "the store",
            list_keys=lambda folder: (
                key.removeprefix(_FOLDER) for key, _ in store.list_keys(_FOLDER + folder)
            ),
            read=lambda key, most: store.read(_FOLDER + key, most),
        )
        named = {live.run for live in told.values()}
        names = sorted(self._journal.runs(), key=lambda name: (name in named, name))
        self.runs = list(map(self._journal.look, names[-_MOST_RUNS:]))
        self.skipped = sum(run.skipped for run in self.runs)
        self.left_out = sum(run.left_out for run in self.runs) + len(names[:-_MOST_RUNS])
        counts: dict[int, tuple[ReplicaHandle, ReplicaStatus | None]] = {}
        for run in sorted(self.runs, key=_last_end):
            for handle in run.handles:
                if not handle.rank < handle.world_size <= _MOST_RANKS:
                    self.skipped += 1
                elif handle.rank not in told or told[handle.rank].run in {"", run.run_id}:
                    counts[handle.rank] = handle, run.ends.get(handle, (None,))[0]
        self.handles = {rank: counts[rank][0] for rank in sorted(counts)}
        ends = {rank: end for rank, (_, end) in sorted(counts.items()) if end is not None}
        self.disproved = [rank for rank, end in ends.items() if _is_later(told.get(rank), end)]
        self.ends = {
            self.handles[rank]: end for rank, end in ends.items() if rank not in self.disproved
        }

    def log(self, handle: ReplicaHandle | None) -> str | None:
        """Return the end of a log; None if the journal keeps none that can be read."""
        if handle is None or not any(handle in run.logged for run in self.runs):
            return None
        try:
            return self._journal.log(handle)
        except (InvalidRequestError, SpecVersionError):  # anyone may have written it
            return None

    def facts(self) -> dict[str, Any]:
        """Return this as a JSON value."""
        launches = [(run.run_id, launch) for run in self.runs for launch in run.launches]
        return {
            "launches": [
                {
                    "run_id": clean(run_id),
                    "backend": clean(launch.handles[0].backend_name),
                    "place": place_of(launch.handles),
                    "replicas": len(launch.handles),
                    "options": redact_json(launch.options),
                }
                for run_id, launch in launches[:_MOST_LAUNCHES]
                if launch.handles
            ],
            "ends": [_facts.replica_facts(handle, end) for handle, end in self.ends.items()],
            "disproved": self.disproved,
            "skipped": self.skipped,
            "left_out": self.left_out,
        }


def _last_end(run: RecordedRun) -> float:
    return max((end.finished_at or 0.0 for end, _ in run.ends.values()), default=0.0)


def _is_later(live: Live | None, end: ReplicaStatus) -> bool:
    """Return whether a replica goes on to tell after its end, so that it has not ended."""
    at = end.finished_at
    return live is not None and not live.ended and at is not None and live.time > at + CLOCK

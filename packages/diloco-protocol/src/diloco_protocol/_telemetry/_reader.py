"""Reading what the replicas of a run tell, with bounds, over a few functions of any store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeAlias

from .._errors import InvalidRequestError, SpecVersionError
from ._keys import HistoryKey, newest_keys, parse_end_key, parse_live_key
from ._records import HISTORY_BYTES, LIVE_BYTES, History, Live, read_history

MOST_KEYS = 200_000
"""The most keys of one listing that are looked at."""
MOST_BYTES = 64 * 1024 * 1024
"""The most bytes of objects that a reader keeps, unless it is told otherwise."""
MOST_RUNS = 1000
"""The most folders below a prefix in which a run is looked for."""

_RUN_MARKS = frozenset({"manifest.json", "generations", "live", "journal"})

ListKeys: TypeAlias = Callable[[str], Iterable[tuple[str, object]]]
ReadKey: TypeAlias = Callable[[str, int], bytes | None]


@dataclass(frozen=True, slots=True)
class Told:
    """What the replicas of a run have told so far.

    Attributes:
        live: What each rank does now, in the order of ranks.
        history: What was read of each history object, in the order of ranks, incarnations, syncs.
        skipped: How many objects were not what their keys say. Lines are counted by ``History``.
        of_another_version: How many live objects were of another version.
        left_out: How many objects were not read since there are too many.
        ends: The last live record of each incarnation that has told its end, by rank and epoch.
    """

    live: Mapping[int, Live]
    history: Mapping[HistoryKey, History]
    skipped: int
    of_another_version: int
    left_out: int
    ends: Mapping[tuple[int, int], Live] = field(default_factory=dict)


class RunReader:
    """Reads what a run tells, again and again; what has not changed is not read again.

    Args:
        list_keys: Given a folder (``"live/"``), returns all keys below it, each with something that
            changes whenever the object is written again (an ETag, a time); None if that is unknown.
        read: Given a key and a number of bytes, returns so many bytes from the object's beginning,
            all of it if it has fewer, and None if there is no such object.
        most_bytes: The most bytes of objects that are kept.
    """

    def __init__(self, list_keys: ListKeys, read: ReadKey, *, most_bytes: int = MOST_BYTES) -> None:
        self._list, self._read, self._most_bytes = list_keys, read, most_bytes
        self._kept: dict[str, tuple[object, int, Live | History | Exception]] = {}

    def look(self, *, history: bool = True) -> Told:
        """Return what is there now: one listing of each folder, and what has changed.

        Where there is too much, the newest history of every rank comes first.

        Args:
            history: Whether history is read as well.
        """
        before, self._kept = self._kept, {}
        lives, foreign = self._listed("live/")
        stamps, strangers = self._listed("history/") if history else ({}, 0)
        newest = newest_keys(stamps)
        skipped = foreign + strangers
        skipped += sum(parse_live_key(key) is None for key in lives)
        ends = [key for key in sorted(stamps) if parse_end_key(key) is not None]
        skipped += sum(HistoryKey.parse(key) is None for key in stamps) - len(ends)
        wanted = [key for key in sorted(lives) if parse_live_key(key) is not None]
        wanted += [key.key for key in _newest_first(newest)]
        wanted += ends
        stamps_of = stamps | lives
        total = left_out = 0
        for key in wanted:
            if total >= self._most_bytes:
                left_out += 1
                continue
            kept = before.get(key)
            if kept is None or kept[0] is None or kept[0] != stamps_of[key]:
                kept = self._kept_now(key, stamps_of[key])
            if kept is not None:
                self._kept[key] = kept
                total += kept[1]
        records = {key: kept[2] for key, kept in self._kept.items()}
        wrong = [record for record in records.values() if isinstance(record, Exception)]
        other = sum(isinstance(error, SpecVersionError) for error in wrong)
        told = {key: record for key, record in records.items() if isinstance(record, Live)}
        texts = {key: records.get(key.key) for key in newest}
        return Told(
            live={record.rank: record for key, record in told.items() if key in lives},
            history={key: record for key, record in texts.items() if isinstance(record, History)},
            skipped=skipped + len(wrong) - other,
            of_another_version=other,
            left_out=left_out,
            ends={(each.rank, each.epoch): each for key, each in told.items() if key in stamps},
        )

    def _listed(self, folder: str) -> tuple[dict[str, object], int]:
        """Return the keys below a folder, and how many others were listed."""
        listed = dict(islice(self._list(folder), MOST_KEYS))
        below = {key: stamp for key, stamp in listed.items() if key.startswith(folder)}
        return below, len(listed) - len(below)

    def _kept_now(
        self, key: str, stamp: object
    ) -> tuple[object, int, Live | History | Exception] | None:
        most = HISTORY_BYTES if HistoryKey.parse(key) else LIVE_BYTES
        data = self._read(key, most + 1)
        if data is None:
            return None  # replaced since it was listed
        try:
            return stamp, len(data), _parsed(key, data)
        except (InvalidRequestError, SpecVersionError) as error:
            return stamp, len(data), error.with_traceback(None)


def _parsed(key: str, data: bytes) -> Live | History:
    if HistoryKey.parse(key):
        return read_history(data)
    live = Live.from_bytes(data)
    if parse_live_key(key) != live.rank and parse_end_key(key) != (live.rank, live.epoch):
        raise InvalidRequestError(f"{key} is about incarnation {live.epoch} of rank {live.rank}")
    return live


def _newest_first(keys: Iterable[HistoryKey]) -> list[HistoryKey]:
    """Return keys so that the newest one of every rank comes first, then the second newest."""
    turn: Counter[int] = Counter()
    order = []
    for key in sorted(keys, reverse=True):
        order.append((turn[key.rank], key))
        turn[key.rank] += 1
    return [key for _, key in sorted(order)]


def find_runs(names: Callable[[str], Iterable[str]]) -> list[str]:
    """Return the runs of a prefix: ``[""]`` if it is that of a run, or the folders that hold one.

    Args:
        names: Given a folder below the prefix (``""`` for the prefix), returns the names of what is
            directly in it.
    """
    top_names = set(islice(names(""), MOST_KEYS))
    if _RUN_MARKS & top_names:
        return [""]
    folders = sorted(top_names)[:MOST_RUNS]
    return [folder for folder in folders if _RUN_MARKS & set(islice(names(folder), MOST_KEYS))]

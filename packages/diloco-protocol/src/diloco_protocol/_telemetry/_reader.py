"""Reading what the replicas of a run tell, with bounds, over a few functions of any store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeAlias, TypeVar

from .._errors import InvalidRequestError, SpecVersionError
from ._keys import EndKey, HistoryKey, end_key, newest_keys, parse_end_key, parse_live_key
from ._records import HISTORY_BYTES, LIVE_BYTES, History, Live, read_history

MOST_KEYS = 200_000
"""The most keys of one listing that are looked at."""
MOST_BYTES = 64 * 1024 * 1024
"""The most bytes of objects that a reader keeps, unless it is told otherwise."""
MOST_ENDS = 10_000
"""The most ends of incarnations that are read, each with a request of its own."""
MOST_RUNS = 1000
"""The most folders below a prefix in which a run is looked for."""

_RUN_MARKS = frozenset({"manifest.json", "generations", "live", "journal"})

ListKeys: TypeAlias = Callable[[str], Iterable[tuple[str, object]]]
ReadKey: TypeAlias = Callable[[str, int], bytes | None]
_Key = TypeVar("_Key", HistoryKey, EndKey)


@dataclass(frozen=True, slots=True)
class Told:
    """What the replicas of a run have told so far.

    Attributes:
        live: What each rank does now, in the order of ranks.
        history: What was read of each history object, in the order of ranks, incarnations, syncs.
        skipped: How many objects were not what their keys say. Lines are counted by ``History``.
        of_another_version: How many live objects were of another version.
        left_out: How many objects were not read since there are too many. The end of a listing that
            was cut off counts as one.
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

        Where there is too much, the newest history of every rank comes first, and then the newest
        ends.

        Args:
            history: Whether history is read as well.
        """
        before, self._kept = self._kept, {}
        lives, foreign, cut = self._listed("live/")
        stamps, strangers, cut_too = self._listed("history/") if history else ({}, 0, 0)
        newest = newest_keys(stamps)
        skipped = foreign + strangers
        skipped += sum(parse_live_key(key) is None for key in lives)
        ends = list(filter(None, map(parse_end_key, stamps)))
        skipped += sum(HistoryKey.parse(key) is None for key in stamps) - len(ends)
        wanted = [key for key in sorted(lives) if parse_live_key(key) is not None]
        wanted += [key.key for key in _newest_first(newest)]
        wanted += [end_key(*key) for key in _newest_first(ends)[:MOST_ENDS]]
        stamps_of = stamps | lives
        total, left_out = 0, max(0, len(ends) - MOST_ENDS) + cut + cut_too
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
        live = {record.rank: record for key, record in told.items() if key in lives}
        over = {(each.rank, each.epoch): each for key, each in told.items() if key in stamps}
        believed = {key: over[key] for key in sorted(over) if not _goes_on(live, over[key])}
        return Told(
            live=live,
            history={key: record for key, record in texts.items() if isinstance(record, History)},
            skipped=skipped + len(wrong) - other + len(over) - len(believed),
            of_another_version=other,
            left_out=left_out,
            ends=believed,
        )

    def _listed(self, folder: str) -> tuple[dict[str, object], int, int]:
        """Return the keys below a folder, how many others were listed, and 1 if it was cut off."""
        listing = iter(self._list(folder))
        listed = dict(islice(listing, MOST_KEYS))
        below = {key: stamp for key, stamp in listed.items() if key.startswith(folder)}
        return below, len(listed) - len(below), int(next(listing, None) is not None)

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


def _goes_on(lives: Mapping[int, Live], end: Live) -> bool:
    """Return whether an incarnation has told something after its end, which then is none."""
    live = lives.get(end.rank, end)
    return live.epoch == end.epoch and live.time > end.time


def _parsed(key: str, data: bytes) -> Live | History:
    if HistoryKey.parse(key):
        return read_history(data)
    live = Live.from_bytes(data)
    is_end = live.ended is not None and parse_end_key(key) == (live.rank, live.epoch)
    if parse_live_key(key) != live.rank and not is_end:
        raise InvalidRequestError(
            f"{key} is about incarnation {live.epoch} of rank {live.rank}, ended: {live.ended}"
        )
    return live


def _newest_first(keys: Iterable[_Key]) -> list[_Key]:
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

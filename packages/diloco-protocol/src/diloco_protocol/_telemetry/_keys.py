"""The keys of telemetry objects below the prefix of a run."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

_LIVE_KEY = re.compile(r"live/(\d{5})\.json", re.ASCII)
_END_KEY = re.compile(r"history/(\d{5})/(\d{4}|[1-9]\d{4,17})\.end\.json", re.ASCII)
# Every number can be written in only one way, so that no two keys mean the same.
_SYNC = r"(\d{8}|[1-9]\d{8,17})"
_HISTORY_KEY = re.compile(
    rf"history/(\d{{5}})/(\d{{4}}|[1-9]\d{{4,17}})\.{_SYNC}-{_SYNC}\.jsonl", re.ASCII
)


def live_key(rank: int) -> str:
    """Return the key of a rank's ``live/`` object."""
    return f"live/{rank:05}.json"


def parse_live_key(key: str) -> int | None:
    """Return the rank whose ``live/`` object has this key; None if it is not such a key."""
    match = _LIVE_KEY.fullmatch(key)
    return int(match[1]) if match else None


def end_key(rank: int, epoch: int) -> str:
    """Return the key of the object with the end of an incarnation."""
    return f"history/{rank:05}/{epoch:04}.end.json"


class EndKey(NamedTuple):
    """The rank and the incarnation that the key of an end names."""

    rank: int
    epoch: int


def parse_end_key(key: str) -> EndKey | None:
    """Return the rank and the incarnation whose end has this key; None if it is not such a key."""
    match = _END_KEY.fullmatch(key)
    return EndKey(int(match[1]), int(match[2])) if match else None


@dataclass(frozen=True, slots=True, order=True)
class HistoryKey:
    """What the key of a ``history/`` object says.

    Attributes:
        rank: The rank.
        epoch: The incarnation.
        first: The number of the sync in its first line; see :class:`SyncLine`.
        last: The number of the sync in its last line.
    """

    rank: int
    epoch: int
    first: int
    last: int

    @property
    def key(self) -> str:
        """The key that says this."""
        return f"history/{self.rank:05}/{self.epoch:04}.{self.first:08}-{self.last:08}.jsonl"

    @classmethod
    def parse(cls, key: str) -> HistoryKey | None:
        """Return what a key says; None if it is not that of a ``history/`` object."""
        match = _HISTORY_KEY.fullmatch(key)
        if match is None:
            return None
        parsed = cls(*map(int, match.groups()))
        return parsed if 0 < parsed.first <= parsed.last else None


def newest_keys(keys: Iterable[str]) -> list[HistoryKey]:
    """Return the ``history/`` objects among these keys, in order, without those that were replaced.

    An object that is rewritten gets another key, since it ends with another sync. Where the one
    before was not deleted, it says nothing that the longer one does not.
    """
    parsed = filter(None, map(HistoryKey.parse, keys))
    return sorted({(key.rank, key.epoch, key.first): key for key in sorted(parsed)}.values())

"""The entries of a call's log, each given once, however often the log is read.

Entries that arrive late are given too.
"""

from __future__ import annotations

import contextlib
import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

from .._client._errors import DenseLogError
from .._state._record import LATEST

Fetch = Callable[[Callable[[Any], Any], int], list[Any]]
"""A function that returns entries of a call's log.

Its arguments are a function that asks the log, and the most bytes that the entries may have; if
there are more, it raises ``DenseLogError``.
"""

MOST_BYTES = 8 * 1024 * 1024
"""Bytes of a log that are in memory at once: a longer stretch is read in parts."""

CLOCKS = 3600.0
"""Seconds by which clocks may differ: those of this machine, of the launching one and of Modal.

Entries outside this range are not read.
"""
_LATE_SECONDS = 30.0
"""Seconds by which a late entry may be older than those already read, to be found at the next look.

Entries that are even later are found at the end.
"""
_BRIEF = 100_000
"""Microseconds of a brief stretch, of which more bytes may be read at once."""
_SHORTEST = 2000
"""Microseconds of a stretch that is not divided: Modal's client may refuse each part as well."""
_BRIEF_FACTOR = 4
"""How many times as many bytes of a brief stretch may be read at once."""
_EPOCH = datetime.fromtimestamp(0, UTC)
_WORD = 2**64


class Entries:
    """The entries that have been read of a log. Not thread-safe.

    A look reads the last half minute again, so it takes as long for a long log as for a short one.
    Modal's client gives no position in a log from which to continue, and entries with the same
    time, or with an earlier one, may arrive later. So every entry that was given is remembered, in
    eight bytes.

    Args:
        fetch: Reads entries of the call's log.
        source: ``"stdout"``, ``"stderr"``, or None for all.
        begin: Unix seconds; nothing older is read.
        clock: Returns the time in Unix seconds.

    Attributes:
        gap: Begin and end, in microseconds, of the last stretch that could not be read because it
            had too many bytes.
    """

    def __init__(
        self, fetch: Fetch, source: str | None, begin: float, clock: Callable[[], float]
    ) -> None:
        self._fetch, self._source, self._begin, self._clock = fetch, source, begin, clock
        self._given: dict[int, array[int]] = {}  # by minute
        self._newest = begin
        self.gap = (0, -1)

    def new(self, until: float | None = None, *, whole: bool = False) -> Iterator[list[Any]]:
        """Yield the entries that were not given before, in the order of Modal's client, in parts.

        Args:
            until: Unix seconds; None for all.
            whole: Whether to read the whole log again, to find entries that have arrived later
                than :data:`_LATE_SECONDS` allow.

        Raises:
            BackendError: Modal could not be asked.
        """
        # The clock of a container may be ahead of the next container's.
        recent = min(self._newest, self._clock()) - _LATE_SECONDS
        # Without an end the client would use the time of its own clock, which may have been set
        # back. If the end were far away, it would ask for every day until then.
        latest = min(max(self._newest, self._clock()) + CLOCKS, LATEST)
        until = latest if until is None else min(until, latest)
        since = self._begin if whole else max(self._begin, recent)
        yield from self._between(int(since * 1e6), math.ceil(until * 1e6))

    def not_given(self, entries: list[Any]) -> list[Any]:
        """Return the entries that were not given before; from now on they count as given."""
        dated = [(int(entry.timestamp.timestamp() // 60), entry) for entry in entries]
        known: Counter[int] = Counter()
        for minute in {minute for minute, _ in dated} & self._given.keys():
            known.update(self._given[minute])
        fresh = []
        for minute, entry in dated:
            word = _word(entry)
            if known[word]:
                known[word] -= 1
                continue
            self._given.setdefault(minute, array("Q")).append(word)
            self._newest = max(self._newest, entry.timestamp.timestamp())
            fresh.append(entry)
        return fresh

    def _between(self, since: int, until: int) -> Iterator[list[Any]]:
        """Yield the entries between two times in microseconds.

        In place of entries that are too many to be read, there is one that says so.
        """
        if since >= until:
            return
        begin, end = (_EPOCH + timedelta(microseconds=edge) for edge in (since, until))
        most = MOST_BYTES if until - since > _BRIEF else _BRIEF_FACTOR * MOST_BYTES
        entries: list[Any] | None = None
        # The parts are not read while the error is being handled, since it keeps what was read.
        with contextlib.suppress(DenseLogError):
            entries = self._fetch(
                lambda logs: logs.fetch(since=begin, until=end, source=self._source), most
            )
        if entries is not None:
            yield self.not_given(entries)
        elif until - since > _SHORTEST:
            # It is not documented whether the end itself is included. So the parts overlap;
            # not_given() drops what would be given twice.
            middle = (since + until) // 2
            yield from self._between(since, middle + 1)
            yield from self._between(middle, until)
        else:
            if not self.gap[0] <= since <= self.gap[1]:  # a time may be in two parts
                yield self.not_given([self._gap(begin.replace(microsecond=0))])
                self.gap = since, until
            self.gap = self.gap[0], max(self.gap[1], until)

    def _gap(self, second: datetime) -> Any:
        """Return an entry that stands for entries that cannot be read.

        It is the same for all entries of one second, so it is given once.
        """
        text = (
            f"[... more was printed at {second:%H:%M:%S} UTC than can be read: lines are missing "
            "here ...]\n"
        )
        earliest = _EPOCH + timedelta(microseconds=math.ceil(self._begin * 1e6))
        return SimpleNamespace(
            message=text,
            timestamp=max(second, earliest),
            source="gap",
            context_ids=[],
        )


def _word(entry: Any) -> int:
    identity = entry.timestamp, entry.source, tuple(entry.context_ids), entry.message
    return hash(identity) % _WORD

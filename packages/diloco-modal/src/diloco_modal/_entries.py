"""The entries of a call's log: each of them once, however often the log is read, and also where they arrive late."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

from ._errors import DenseLogError
from ._record import LATEST

Fetch = Callable[[Callable[[Any], Any], int], list[Any]]
"""Entries, from what it asks the log of a call, and how many bytes they may be; more is a ``DenseLogError``."""

MOST_BYTES = 8 * 1024 * 1024
"""Of a log that are held at once: a longer stretch is read in parts."""

CLOCKS = 3600.0
"""Seconds by which the clocks of this machine, of who launched the run and of Modal may differ: what lies outside is not read."""
_LATE_SECONDS = 30.0
"""So much older than what was read already an entry may be when it arrives, and is found at the next look; others at the end."""
_BRIEFEST = 0.1
"""Seconds that are not divided."""
_OVERLAP = 0.001
"""Seconds that both halves of what is divided have in common."""
_BRIEFEST_FACTOR = 4
"""How much more than usual may be in one of them."""
_WORD = 2**64


class Entries:
    """What has been read of a log. Not for several threads.

    A look reads the last half minute again, so it takes as long for a long log as for a short one. Modal's client gives no
    position in a log to go on from, and entries with one and the same time, or with an earlier one, may come later; hence each
    that was given is known by eight bytes.

    Args:
        fetch: Entries, from what it asks the log of the call.
        source: ``"stdout"``, ``"stderr"``, or None for all.
        begin: Unix seconds; nothing older is read.
        clock: Unix seconds.
    """

    def __init__(
        self, fetch: Fetch, source: str | None, begin: float, clock: Callable[[], float]
    ) -> None:
        self._fetch, self._source, self._begin, self._clock = fetch, source, begin, clock
        self._given: dict[int, array[int]] = {}  # by the minute
        self._newest = begin

    def new(self, until: float | None = None, *, whole: bool = False) -> Iterator[list[Any]]:
        """The entries that were not given before, in the order of Modal's client, part by part.

        Args:
            until: Unix seconds; None for all.
            whole: Read the whole log again, also for what has arrived later than :data:`_LATE_SECONDS` allow.

        Raises:
            DenseLogError: There is too much in a few seconds.
            BackendError: Modal could not be asked.
        """
        # The clock of a container may be ahead of that of the next one.
        recent = min(self._newest, self._clock()) - _LATE_SECONDS
        # Without an end the client would take the time of its own clock, which may also be set back; and one that is far away
        # it would ask for day by day.
        latest = min(max(self._newest, self._clock()) + CLOCKS, LATEST)
        until = latest if until is None else min(until, latest)
        yield from self._between(self._begin if whole else max(self._begin, recent), until)

    def not_given(self, entries: list[Any]) -> list[Any]:
        """Those that were not given before; they count as given from now on."""
        dated = [(int(each.timestamp.timestamp() // 60), each) for each in entries]
        known: Counter[int] = Counter()
        for minute in {minute for minute, _ in dated} & self._given.keys():
            known.update(self._given[minute])
        fresh = []
        for minute, each in dated:
            word = _word(each)
            if known[word]:
                known[word] -= 1
                continue
            self._given.setdefault(minute, array("Q")).append(word)
            self._newest = max(self._newest, each.timestamp.timestamp())
            fresh.append(each)
        return fresh

    def _between(self, since: float, until: float) -> Iterator[list[Any]]:
        if since >= until:
            return
        begin, end = datetime.fromtimestamp(since, UTC), datetime.fromtimestamp(until, UTC)
        brief = until - since <= _BRIEFEST
        found: list[Any] | None = None
        try:
            found = self._fetch(
                lambda logs: logs.fetch(since=begin, until=end, source=self._source),
                _BRIEFEST_FACTOR * MOST_BYTES if brief else MOST_BYTES,
            )
        except DenseLogError:
            if brief:
                raise
        # Not while the error is handled: it holds what was read.
        if found is None:
            # Whether an end counts is not documented: the halves overlap, and nothing is given twice.
            middle = (since + until) / 2
            yield from self._between(since, middle + _OVERLAP)
            yield from self._between(middle, until)
            return
        yield self.not_given(found)


def _word(entry: Any) -> int:
    told = entry.timestamp, entry.source, tuple(entry.context_ids), entry.message
    return hash(told) % _WORD

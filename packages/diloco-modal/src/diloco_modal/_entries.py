"""The entries of a call's log: each of them once, however often the log is read, and also where they arrive late."""

from __future__ import annotations

import contextlib
import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
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
_BRIEF = 100_000
"""Microseconds of which more may be read at once than usual, before they are divided further."""
_BRIEF_FACTOR = 4
"""How much more."""
_REFUSALS = 20
"""How often one of these is divided: what Modal's client refuses, it may refuse also in each part of it."""
_EPOCH = datetime.fromtimestamp(0, UTC)
_WORD = 2**64


class Entries:
    """What has been read of a log. Not for several threads.

    A look reads the last half minute again, so it takes as long for a long log as for a short one.
    Modal's client gives no position in a log to go on from, and entries with one and the same time,
    or with an earlier one, may come later; hence each that was given is known by eight bytes.

    Args:
        fetch: Entries, from what it asks the log of the call.
        source: ``"stdout"``, ``"stderr"``, or None for all.
        begin: Unix seconds; nothing older is read.
        clock: Unix seconds.

    Attributes:
        gap: Begin and end, in microseconds, of the last stretch that could not be read, since there
            was too much at one time.
    """

    def __init__(
        self, fetch: Fetch, source: str | None, begin: float, clock: Callable[[], float]
    ) -> None:
        self._fetch, self._source, self._begin, self._clock = fetch, source, begin, clock
        self._given: dict[int, array[int]] = {}  # by the minute
        self._newest = begin
        self.gap = (0, -1)

    def new(self, until: float | None = None, *, whole: bool = False) -> Iterator[list[Any]]:
        """The entries that were not given before, in the order of Modal's client, part by part.

        Args:
            until: Unix seconds; None for all.
            whole: Read the whole log again, also for what has arrived later than
                :data:`_LATE_SECONDS` allow.

        Raises:
            BackendError: Modal could not be asked.
        """
        # The clock of a container may be ahead of that of the next one.
        recent = min(self._newest, self._clock()) - _LATE_SECONDS
        # Without an end the client would take the time of its own clock, which may also be set
        # back; and one that is far away it would ask for day by day.
        latest = min(max(self._newest, self._clock()) + CLOCKS, LATEST)
        until = latest if until is None else min(until, latest)
        since = self._begin if whole else max(self._begin, recent)
        yield from self._between(int(since * 1e6), math.ceil(until * 1e6))

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

    def _between(
        self, since: int, until: int, refusals: Iterator[int] | None = None
    ) -> Iterator[list[Any]]:
        """Entries between two times in microseconds; where there are too many at a time to be read, one that says so."""
        if since >= until:
            return
        begin, end = (_EPOCH + timedelta(microseconds=each) for each in (since, until))
        if until - since > _BRIEF:
            refusals = None
        elif refusals is None:
            refusals = iter(range(_REFUSALS))
        found: list[Any] | None = None
        # Not read again while the error is handled: it holds what was read.
        with contextlib.suppress(DenseLogError):
            found = self._fetch(
                lambda logs: logs.fetch(since=begin, until=end, source=self._source),
                MOST_BYTES if refusals is None else _BRIEF_FACTOR * MOST_BYTES,
            )
        if found is not None:
            yield self.not_given(found)
        elif refusals is None or (until - since > 2 and next(refusals, None) is not None):
            # Whether an end counts is not documented: the parts overlap, and nothing is given
            # twice.
            step = max(1, (until - since) // (2 if refusals is None else 10))
            for first in range(since, until, step):
                yield from self._between(first, min(first + step + 1, until), refusals)
        else:
            if not self.gap[0] <= since <= self.gap[1]:  # a time may be in two parts
                yield self.not_given([self._gap(begin.replace(microsecond=0))])
                self.gap = since, until
            self.gap = self.gap[0], max(self.gap[1], until)

    def _gap(self, second: datetime) -> Any:
        """What stands for entries that cannot be read; the same for all of one second, so that it is given once."""
        text = f"[... more was printed at {second:%H:%M:%S} UTC than can be read: lines are missing here ...]\n"
        earliest = _EPOCH + timedelta(microseconds=math.ceil(self._begin * 1e6))
        return SimpleNamespace(
            message=text,
            timestamp=max(second, earliest),
            source="gap",
            context_ids=[],
        )


def _word(entry: Any) -> int:
    told = entry.timestamp, entry.source, tuple(entry.context_ids), entry.message
    return hash(told) % _WORD

"""The lines of a call's log."""

from __future__ import annotations

import itertools
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

from diloco_protocol import Backoff, LogQuery
from diloco_protocol.backend import LineSplitter, LogEnd, Look, follow

from .._client._errors import DenseLogError
from ._log_entries import CLOCKS, MOST_BYTES, Entries, Fetch

_QUIET_LOOKS = 3
"""How many looks after the end must find nothing new before a followed log counts as complete.

A container that has returned its result still passes on what it has printed.
"""

_MOST_ENTRIES = 20_000
"""The most entries of the end of a log that the client returns."""

_MODAL = "system"
"""The source of entries by Modal itself, such as that the call's container was preempted."""


class Lines:
    """Puts lines together from entries, which may be cut anywhere, without those of Modal itself.

    Not thread-safe.

    Each stream of each container has lines of its own: no stream continues a line of another.
    """

    def __init__(self) -> None:
        self._begun: dict[tuple[str, str], LineSplitter] = {}
        self._containers: set[str] = set()

    def feed(self, entries: Iterable[Any]) -> Iterator[str]:
        """Yield the lines that are completed by some entries."""
        for entry in entries:
            if entry.source == _MODAL:
                continue
            container = next((name for name in entry.context_ids if name.startswith("ta-")), "")
            if container and container not in self._containers:
                self._containers.add(container)
                yield from self.rest()  # lines that an earlier container began ended with it
            splitter = self._begun.setdefault((container, entry.source), LineSplitter())
            for line in splitter.feed(entry.message.encode()):
                yield line.decode(errors="replace")

    def rest(self) -> Iterator[str]:
        """Yield the beginnings of lines whose ends have not arrived."""
        for splitter in self._begun.values():
            if (line := splitter.rest()) is not None:
                yield line.decode(errors="replace")


def read_log(
    fetch: Fetch,
    query: LogQuery,
    terminal: Callable[[], bool],
    clock: Callable[[], float],
    backoff: Backoff,
    since: float,
) -> Iterator[str]:
    """Yield the lines that a query asks for.

    Args:
        fetch: Reads entries of the call's log.
        query: Says which lines to read.
        terminal: Returns whether the replica has ended.
        clock: Returns the time in Unix seconds.
        backoff: Pauses while following.
        since: When the run was launched, in Unix seconds; no line is older.
    """
    source = None if query.streams == "combined" else query.streams
    begin = max(query.since or 0.0, since - CLOCKS, 0.0)
    if query.n_lines is not None:
        yield from _tail(fetch, query.n_lines, source, begin, clock)
        return
    entries, lines = Entries(fetch, source, begin, clock), Lines()

    def read(_: bool, *, whole: bool = False) -> Generator[str, None, Look]:
        fresh = 0
        for part in entries.new(query.until, whole=whole):
            fresh += sum(entry.source != _MODAL for entry in part)
            inside = (entry for entry in part if query.covers(entry.timestamp.timestamp()))
            yield from filter(query.selects, lines.feed(inside))
        return Look(fresh > 0)

    yield from follow(query, read, terminal, backoff, clock, LogEnd(looks=_QUIET_LOOKS))
    if query.follow:
        yield from read(True, whole=True)
    yield from filter(query.selects, lines.rest())


def _tail(
    fetch: Fetch, wanted: int, source: str | None, begin: float, clock: Callable[[], float]
) -> list[str]:
    """Return the last lines; an entry may be a piece of a line, as a step of a progress bar is."""
    n_entries, lines = wanted + 1, list[str]()
    while n_entries <= _MOST_ENTRIES:
        count = n_entries
        try:
            last = fetch(lambda logs, count=count: logs.tail(count, source=source), MOST_BYTES)  # type: ignore[misc]
        except DenseLogError:
            break
        # The client asks for entries older than its own clock, which may be slow.
        newest = max((entry.timestamp.timestamp() for entry in last), default=begin)
        later = (
            [entry for entry in part if entry.timestamp.timestamp() > newest]
            for part in Entries(fetch, source, newest, clock).new()
        )
        lines = _last_lines(wanted + 1, itertools.chain([last], later))
        if len(lines) > wanted or len(last) < n_entries:
            return lines[-wanted:]
        n_entries *= 2
    entries = Entries(fetch, source, begin, clock)
    read = _last_lines(wanted, entries.new())
    return lines[-wanted:] if entries.gap[1] > 0 and len(lines) > len(read) else read


def _last_lines(wanted: int, parts: Iterable[list[Any]]) -> list[str]:
    made, lines = Lines(), deque[str](maxlen=min(wanted, sys.maxsize))
    for part in parts:
        lines.extend(made.feed(part))
    lines.extend(made.rest())
    return list(lines)

"""The lines of a call's log."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

from diloco_protocol import Backoff, LogQuery
from diloco_protocol.backend import LineSplitter

Fetch = Callable[[Callable[[Any], Any]], list[Any]]
_QUIET_LOOKS = 3
"""How often nothing new is seen after the end until a log that is followed counts as complete: a container that has given its
result still passes on what it has printed."""

_MOST_ENTRIES = 20_000
"""So many the client gives of the end of a log at most."""
_CLOCKS = 3600.0
"""Seconds by which the clocks of this machine, of who launched the run and of Modal may differ: what lies outside is not read."""


def lines_of(entries: list[Any]) -> tuple[list[str], int]:
    """The lines in entries, which are cut anywhere; and how many of them, the last ones, may still go on.

    Each stream of each container has lines of its own: one does not go on with what another has begun.
    """
    lines: list[str] = []
    begun: dict[Any, LineSplitter] = {}
    container = None

    def flush() -> int:
        rests = [rest for each in begun.values() if (rest := each.rest()) is not None]
        lines.extend(rest.decode(errors="replace") for rest in rests)
        return len(rests)

    for entry in entries:
        runs_in = [name for name in entry.context_ids if name.startswith("ta-")]
        if runs_in != container:
            flush()
            container = runs_in
        splitter = begun.setdefault(entry.source, LineSplitter())
        lines.extend(
            line.decode(errors="replace") for line in splitter.feed(entry.message.encode())
        )
    return lines, flush()


def read_log(
    fetch: Fetch,
    query: LogQuery,
    terminal: Callable[[], bool],
    clock: Callable[[], float],
    backoff: Backoff,
    since: float,
) -> Iterator[str]:
    """The lines that a query asks for.

    Args:
        fetch: Entries, from what it asks the log of the call.
        query: Which lines.
        terminal: Whether the replica has ended.
        clock: Unix seconds.
        backoff: Pauses while following.
        since: When the run was launched, in Unix seconds; nothing is older.
    """
    source = None if query.streams == "combined" else query.streams
    begin = datetime.fromtimestamp(max(query.since or 0.0, since - _CLOCKS, 0.0), UTC)

    def read() -> list[Any]:
        # Without an end the client takes the time of its own clock.
        last = clock() + _CLOCKS if query.until is None else query.until
        end = datetime.fromtimestamp(last, UTC)
        return fetch(lambda logs: logs.fetch(since=begin, until=end, source=source))

    if query.n_lines is not None:
        yield from _tail(fetch, query.n_lines, source, read)
        return
    pattern = None if query.regex is None else re.compile(query.regex)
    given, seen, quiet, ended, delays = 0, 0, 0, False, backoff.delays()
    while True:
        late = query.until is not None and clock() >= query.until
        if not ended and query.follow and terminal():
            ended, delays = True, backoff.delays()
        entries = read()
        quiet = quiet + 1 if ended and len(entries) == seen else 0
        seen = len(entries)
        last = late or not query.follow or quiet >= _QUIET_LOOKS
        lines, open_ones = lines_of([each for each in entries if _within(each, query)])
        whole = len(lines) - (0 if last else open_ones)
        fresh = lines[given:whole]
        for line in fresh:
            if pattern is None or pattern.search(line):
                yield line
        if last:
            return
        if fresh:
            given, delays = whole, backoff.delays()
        backoff.sleep(next(delays))


def _tail(
    fetch: Fetch, wanted: int, source: str | None, read: Callable[[], list[Any]]
) -> list[str]:
    """The last lines; an entry may be a piece of one, such as a step of a progress bar."""
    asked = wanted + 1
    while asked <= _MOST_ENTRIES:
        count = asked
        entries = fetch(lambda logs, count=count: logs.tail(count, source=source))  # type: ignore[misc]
        lines, _ = lines_of(entries)
        if len(lines) > wanted or len(entries) < asked:
            return lines[-wanted:]
        asked *= 2
    return lines_of(read())[0][-wanted:]


def _within(entry: Any, query: LogQuery) -> bool:
    at = entry.timestamp.timestamp()
    return (query.since is None or at >= query.since) and (query.until is None or at < query.until)

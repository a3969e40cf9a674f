"""The lines of a call's log."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

from diloco_protocol import Backoff, LogQuery

from ._client import Client


def lines_of(entries: list[Any]) -> list[str]:
    """The lines in entries, which are cut anywhere; a line that a container did not finish is not continued by the next one."""
    pieces: list[str] = []
    before = None
    for each in entries:
        container = [name for name in each.context_ids if name.startswith("ta-")]
        if pieces and container != before and not pieces[-1].endswith("\n"):
            pieces.append("\n")
        pieces.append(str(each.message))
        before = container
    text = "".join(pieces)
    return text.split("\n")[:-1] if text.endswith("\n") else text.split("\n") if text else []


def read_log(
    client: Client,
    call: str,
    query: LogQuery,
    terminal: Callable[[], bool],
    backoff: Backoff,
    since: float,
    clock: Callable[[], float],
) -> Iterator[str]:
    """The lines that a query asks for.

    Args:
        client: To ask.
        call: Id of the call.
        query: Which lines.
        terminal: Whether the replica has ended.
        backoff: Pauses while following.
        since: When the run was launched, in Unix seconds; nothing is older.
        clock: Unix seconds.
    """
    source = None if query.streams == "combined" else query.streams
    if query.n_lines is not None:
        yield from _tail(client, call, query.n_lines, source)
        return
    pattern = None if query.regex is None else re.compile(query.regex)
    begin = datetime.fromtimestamp(max(query.since or 0.0, since - 60.0), UTC)
    end = None if query.until is None else datetime.fromtimestamp(query.until, UTC)
    given, delays = 0, backoff.delays()
    while True:
        over = query.until is not None and clock() >= query.until
        last = not query.follow or over or terminal()
        entries = client.log_entries(
            call, lambda logs: logs.fetch(since=begin, until=end, source=source)
        )
        chosen = [each for each in entries if _within(each, query)]
        lines = lines_of(chosen)
        # The last line may go on, as long as the replica lives.
        whole = (
            len(lines)
            if last or not chosen or chosen[-1].message.endswith("\n")
            else len(lines) - 1
        )
        fresh = lines[given:whole]
        for line in fresh:
            if pattern is None or pattern.search(line):
                yield line
        if last:
            return
        if fresh:
            given, delays = whole, backoff.delays()
        backoff.sleep(next(delays))


def _tail(client: Client, call: str, wanted: int, source: str | None) -> list[str]:
    """The last lines; an entry may be a piece of one."""
    asked = wanted + 1

    def tail(logs: Any) -> Any:
        return logs.tail(asked, source=source)

    while True:
        entries = client.log_entries(call, tail)
        lines = lines_of(entries)
        if len(lines) > wanted or len(entries) < asked:
            return lines[-wanted:]
        asked *= 2


def _within(entry: Any, query: LogQuery) -> bool:
    at = entry.timestamp.timestamp()
    return (query.since is None or at >= query.since) and (query.until is None or at < query.until)

"""Reading the log of a replica: all streams of all its attempts, in order."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from diloco_protocol import (
    AuthError,
    Backoff,
    ForbiddenError,
    LogQuery,
    is_result_line,
    retry,
)
from diloco_protocol.backend import split_lines

from ._client import Client
from ._errors import MissingError
from ._names import log_url

T = TypeVar("T")
_SLACK = 120_000  # milliseconds by which a stream may be older than its job
_QUIET_LOOKS = 2
"""How often nothing new is seen after the end until a log counts as complete: events arrive some seconds late."""


class JobLog:
    """The log of one job. Not for several threads."""

    def __init__(
        self,
        client: Client,
        name: str,
        created: int,
        terminal: Callable[[], bool],
        backoff: Backoff,
        patience: float,
        clock: Callable[[], float],
    ) -> None:
        self._client = client
        self._name = name
        self._created = created
        self._terminal = terminal
        self._backoff = backoff
        self._patience = patience
        self._clock = clock

    def lines(self, query: LogQuery) -> Iterator[str]:
        """The lines that a query asks for."""
        chosen = self._chosen(query)
        if query.n_lines is not None:
            yield from self._tail(chosen, query.n_lines)
        elif query.follow:
            yield from self._follow(chosen, query)
        else:
            for stream in self._streams():
                for events in self._forward(stream, query, {}):
                    yield from _lines(events, chosen)

    def _chosen(self, query: LogQuery) -> Callable[[dict[str, Any], str], bool]:
        pattern = None if query.regex is None else re.compile(query.regex)

        def keep(event: dict[str, Any], line: str) -> bool:
            moment = event.get("timestamp", 0) / 1000
            return (
                not is_result_line(line)
                and (query.since is None or moment >= query.since)
                and (query.until is None or moment < query.until)
                and (pattern is None or pattern.search(line) is not None)
            )

        return keep

    def _streams(self) -> list[str]:
        """Those of this job, in order of name; those of an earlier job of this name are left out."""
        found = self._patiently(lambda: list(self._client.log_streams(self._name)))
        return [name for name, created in found if created >= self._created - _SLACK]

    def _tail(self, keep: Callable[[dict[str, Any], str], bool], count: int) -> Iterator[str]:
        """The last lines, read backwards, the newest stream first."""
        last: deque[str] = deque()
        for stream in reversed(self._streams()):
            token: str | None = None
            while len(last) < count:
                more = {} if token is None else {"nextToken": token}
                page = self._page(stream, startFromHead=False, **more)
                last.extendleft(reversed(list(_lines(page.get("events") or [], keep))))
                following = page.get("nextBackwardToken")
                if following is None or following == token:
                    break
                token = following
            if len(last) >= count:
                break
        yield from list(last)[-count:]

    def _follow(
        self, keep: Callable[[dict[str, Any], str], bool], query: LogQuery
    ) -> Iterator[str]:
        tokens: dict[str, str] = {}
        quiet = 0
        delays = self._backoff.delays()
        while True:
            # Lines are dated by the machines, and arrive some seconds late.
            late = query.until is not None and self._clock() >= query.until
            ended = late or self._terminal()
            arrived = False
            for stream in self._streams():
                for events in self._forward(stream, query, tokens):
                    arrived |= bool(events)
                    yield from _lines(events, keep)
            quiet = 0 if arrived or not ended else quiet + 1
            if ended and quiet >= _QUIET_LOOKS:
                return
            if arrived:
                delays = self._backoff.delays()
            self._backoff.sleep(next(delays))

    def _forward(
        self, stream: str, query: LogQuery, tokens: dict[str, str]
    ) -> Iterator[list[dict[str, Any]]]:
        """The pages of a stream from where ``tokens`` says on, until the token comes back unchanged: some are empty."""
        span = {}
        if query.since is not None:
            span["startTime"] = max(0, int(query.since * 1000))
        while True:
            token = tokens.get(stream)
            more = {} if token is None else {"nextToken": token}
            page = self._page(stream, startFromHead=True, **span, **more)
            yield page.get("events") or []
            following = page.get("nextForwardToken")
            if following is None or following == token:
                return
            tokens[stream] = following

    def _page(self, stream: str, **query: Any) -> dict[str, Any]:
        try:
            return self._patiently(lambda: self._client.log_events(stream, **query))
        except MissingError:
            return {}  # it was deleted while it was read

    def _patiently(self, call: Callable[[], T]) -> T:
        try:
            return retry(call, self._backoff, timeout=self._patience)
        except (ForbiddenError, AuthError) as error:
            kind = type(error)
            raise kind(
                f"{error}. The log is at {log_url(self._client.region, self._name)}"
            ) from error


def _lines(
    events: list[dict[str, Any]], keep: Callable[[dict[str, Any], str], bool]
) -> Iterator[str]:
    for event in events:
        pieces = [event.get("message", "").removesuffix("\n").encode(errors="replace") + b"\n"]
        for line in split_lines(pieces):
            text = line.decode(errors="replace")
            if keep(event, text):
                yield text

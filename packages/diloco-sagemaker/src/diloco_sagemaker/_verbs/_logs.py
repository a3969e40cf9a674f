"""Read the log of a replica: all streams of all its attempts, in order."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Generator, Iterator
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from diloco_protocol import (
    AuthError,
    BackendError,
    ForbiddenError,
    LogQuery,
    ReplicaHandle,
    ReplicaNotFoundError,
    UnavailableError,
    retry,
)
from diloco_protocol.backend import LogEnd, Look, follow, shown, split_lines

from .._client._errors import NOT_ITS_OWN, MissingError
from .._request._names import log_url
from .._state._facts import ENDED
from ._runs import Runs

T = TypeVar("T")
_SLACK = 120_000  # milliseconds by which a stream may be older than its job
MOST_STREAMS = 10_000  # of a job; each of its attempts has one
_MOST_EMPTY = 10_000  # pages, one after another


class JobLog:
    """The log of a replica's job. Not thread-safe.

    Raises:
        ReplicaNotFoundError: The job is gone; another one may have its name.
    """

    def __init__(self, runs: Runs, handle: ReplicaHandle) -> None:
        self._client, self._backoff, self._options = runs.client, runs.backoff, runs.options
        self._look = partial(runs.job, handle)
        self._job = self._look()
        self._following = False

    def lines(self, query: LogQuery) -> Iterator[str]:
        """Yield the lines that a query asks for.

        A follower ends when the job is gone, since its streams may then be those of another job.

        Raises:
            ReplicaNotFoundError: The job, or a stream of it, is gone before the whole log was read.
        """
        self._following = query.follow
        try:
            yield from self._found(query)
        except ReplicaNotFoundError:
            if not query.follow:
                raise

    def _found(self, query: LogQuery) -> Iterator[str]:
        if query.n_lines is not None:
            yield from self._tail(query, query.n_lines)
            return
        tokens: dict[str, str] = {}

        def ended() -> bool:
            return self._job.status in ENDED  # as of the look before, which saves calls

        def read(_: bool) -> Generator[str, None, Look]:
            arrived = False
            # Lines get their times from the machines, and arrive some seconds late.
            for stream in self._streams():
                for events in self._pages(stream, tokens, query.since):
                    arrived |= bool(events)
                    yield from _lines(events, query)
            return Look(arrived)

        end = LogEnd(seconds=self._options.log_delay)
        yield from follow(query, read, ended, self._backoff, self._options.clock, end)

    def _streams(self) -> list[str]:
        """List this job's streams in order of name, without those of an earlier job of this name.

        Raises:
            ReplicaNotFoundError: The job is gone, and the streams may be those of another job.
        """
        since = self._job.created - _SLACK

        def look() -> list[str]:
            streams = self._client.log_streams(self._job.name)
            job_streams = (stream for stream, created in streams if created >= since)
            return list(islice(job_streams, MOST_STREAMS + 1))

        stream_names = self._patiently(look)
        self._job = self._patiently(self._look)
        if len(stream_names) > MOST_STREAMS:
            raise BackendError(
                f"the training job {self._job.name} has more than {MOST_STREAMS} log streams. "
                f"{self._place()}"
            )
        return stream_names

    def _tail(self, query: LogQuery, count: int) -> Iterator[str]:
        """Yield the last lines; they are read backwards, from the newest stream on."""
        last: deque[str] = deque()
        for stream in reversed(self._streams()):
            for events in self._pages(stream, {}, back=True):
                left = min(count - len(last), sys.maxsize)
                last.extendleft(reversed(deque(_lines(events, query), maxlen=left)))
                if len(last) >= count:
                    break
            if len(last) >= count:
                break
        yield from last

    def _pages(
        self, stream: str, tokens: dict[str, str], since: float | None = None, *, back: bool = False
    ) -> Iterator[list[dict[str, Any]]]:
        """Yield the events of a stream, page by page, from the stream's place in ``tokens`` on.

        The last page is empty, and its token comes back unchanged. Others may be empty, too.

        Raises:
            UnavailableError: The pages have no end.
        """
        span = {} if since is None else {"startTime": max(0, int(since * 1000))}
        name = "nextBackwardToken" if back else "nextForwardToken"
        mark, pages, empty = None, 0, 0
        while True:
            token = tokens.get(stream)
            more = {} if token is None else {"nextToken": token}
            page = self._page(stream, startFromHead=not back, **span, **more)
            events = page.get("events") or []
            yield events
            following = page.get(name)
            unmoved = following == token
            if following is None or (unmoved and not events):
                return
            pages, empty = pages + 1, 0 if events else empty + 1
            if unmoved or following == mark or empty > _MOST_EMPTY:
                raise UnavailableError(
                    f"cannot read the log stream {shown(stream)}: its pages have no "
                    f"end{NOT_ITS_OWN}"
                )
            if pages.bit_count() == 1:  # finds every circle of tokens, and keeps only one of them
                mark = following
            tokens[stream] = following

    def _page(self, stream: str, **query: Any) -> dict[str, Any]:
        try:
            return self._patiently(lambda: self._client.log_events(stream, **query))
        except MissingError:  # the stream was deleted while it was read
            if not self._following:
                raise
            return {}

    def _patiently(self, call: Callable[[], T]) -> T:
        try:
            return retry(call, self._backoff, timeout=self._options.retry_timeout)
        except (ForbiddenError, AuthError) as error:
            kind = type(error)
            raise kind(f"{error}. {self._place()}") from error

    def _place(self) -> str:
        return f"The log is at {log_url(self._client.region, self._job.name)}"


def _lines(events: list[dict[str, Any]], query: LogQuery) -> Iterator[str]:
    for event in events:
        at = event.get("timestamp", 0) / 1000
        pieces = [event.get("message", "").removesuffix("\n").encode(errors="replace") + b"\n"]
        for line in split_lines(pieces):
            text = line.decode(errors="replace")
            if query.selects(text, at):
                yield text

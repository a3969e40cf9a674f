"""Reading a replica's log: one attempt, from a time on, live, across broken connections."""

from __future__ import annotations

import contextlib
import copy
import re
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from diloco_protocol import (
    BackendError,
    Backoff,
    LogQuery,
    ReplicaNotFoundError,
    ThrottledError,
    is_result_line,
    retry,
)
from diloco_protocol.backend import Look, check_whole, follow, latest_try

from .._client._client import pieces
from .._client._cluster import Cluster
from .._client._errors import BadRequestError, MissingError, NoLogError, SilentError
from .._state._facts import PodFacts, log_is_gone, pods_by_index
from .._state._verdict import read_message
from ._lines import Line, Place, lines_of, written

T = TypeVar("T")

# Text of the kubelet and the API server about a container that has not started, or never did.
_NEVER_BEGUN = re.compile(
    "is waiting to start|is not available|is terminated|does not have a host assigned"
)
_MOST_LINES = 2**30  # a larger tail is the whole log
_LEAST_PIECE = 4096  # characters; containerd's pieces are 16 KiB


@dataclass(frozen=True, slots=True)
class LogSource:
    """The place of the log of one replica.

    Attributes:
        cluster: The cluster.
        namespace: The namespace of the pods.
        job_uid: The uid of the Job whose pods are read.
        index: The replica's index in the Job.
        terminal: Says whether the replica has ended for good.
        clock: Returns the time in Unix seconds.
        backoff: Delays between two looks, and between tries.
        patience: Seconds for which the cluster may be out of reach.
    """

    cluster: Cluster
    namespace: str
    job_uid: str
    index: int
    terminal: Callable[[], bool]
    clock: Callable[[], float]
    backoff: Backoff
    patience: float

    def pods(self) -> list[PodFacts]:
        """Return the replica's pods, the newest last."""
        pods, _ = self.cluster.list_pods(self.namespace, self.job_uid, self.index)
        return pods_by_index(pods).get(self.index, [])

    def lines(self, pod: str, *, follow: bool = False, tail: int | None = None) -> Iterator[Line]:
        """Open the log of one pod, and return its lines; none if its container has not started yet.

        Raises:
            MissingError: The pod or its container is gone.
            NoLogError: The pod exists, and its node says that it has no log.
            BackendError: The log cannot be opened; or the connection broke while it was read.
        """
        try:
            response = self.cluster.open_log(self.namespace, pod, follow=follow, tail=tail)
        except BadRequestError as error:
            if _NEVER_BEGUN.search(str(error)) is None:
                raise
            return iter(())
        lines = lines_of(pieces(f"read the log of pod {pod}", response))
        return written(lines, lambda: log_is_gone(pod, self.pods()))


class Outage:
    """A period during which a log cannot be read.

    Args:
        source: Says how long it may last.
    """

    def __init__(self, source: LogSource) -> None:
        self._backoff = source.backoff
        self._patience = source.patience
        self._since: float | None = None

    def over(self) -> None:
        """End the outage, because the log can be read again."""
        self._since = None

    def goes_on(self, error: BackendError) -> None:
        """Wait a while, because the log cannot be read.

        Raises:
            BackendError: The error itself, if it will not pass or has lasted for too long.
        """
        if not error.retryable:
            raise error
        now = self._backoff.clock()
        since = self._since = now if self._since is None else self._since
        pause = self._backoff.first
        if isinstance(error, ThrottledError) and error.retry_after is not None:
            pause = max(pause, error.retry_after)
        deadline = latest_try(since + self._patience)
        if now + pause > deadline:
            seconds = min(self._patience, deadline - since)
            error.add_note(f"given up after {seconds:g} s of trying again")
            raise error
        self._backoff.sleep(pause)


class PodLog(Iterator[str]):
    """The lines that were asked for; nothing is read before the first is requested.

    Args:
        source: The place of the log.
        query: The selection of lines.
    """

    def __init__(self, source: LogSource, query: LogQuery) -> None:
        self._source = source
        self._query = query
        self._outage = Outage(source)
        self._attempt: int | None = None
        self._lines: Generator[str, None, None] | None = None

    def close(self) -> None:
        """Close the connection, if there is one; nothing more is read.

        Dropping the iterator has the same effect.
        """
        if self._lines is None:
            self._lines = self._read()
        self._lines.close()

    def of(self, attempt: int | None) -> PodLog:
        """Select an attempt other than the newest."""
        check_whole("attempt", attempt, 1, none=True)
        self._attempt = attempt
        return self

    def __next__(self) -> str:
        if self._lines is None:
            # A copy reads, so that no reference cycle keeps the connection open when this object is
            # dropped.
            reader = copy.copy(self)
            self._lines = reader._read()  # noqa: SLF001 - it is an object of this class
        return next(self._lines)

    def _read(self) -> Generator[str, None, None]:
        query, source = self._query, self._source
        pod = self._choose(self._patiently(source.pods))
        if query.n_lines is not None:
            yield from self._tail(pod, query.n_lines)
            return
        lines = self._follow(pod) if query.follow else self._once(pod, Place())
        for line in lines:
            time = line.time
            if time is not None and query.until is not None and time >= query.until:
                return
            if not is_result_line(line.text) and query.selects(line.text, time):
                yield line.text

    def _choose(self, pods: list[PodFacts]) -> PodFacts | None:
        """Return the pod to read; None if it does not exist yet."""
        if self._attempt is not None:
            fitting = [pod for pod in pods if pod.attempt == self._attempt]
            if not fitting:
                attempts = ", ".join(str(pod.attempt) for pod in pods) or "none"
                raise ReplicaNotFoundError(
                    f"there is no log of attempt {self._attempt}; the cluster has those of "
                    f"attempts: {attempts}"
                )
            return fitting[-1]
        if not pods and self._patiently(self._source.terminal):
            raise ReplicaNotFoundError(
                "the replica's pod has been removed, and its log with it: Kubernetes keeps no log "
                "of pods that it ends"
            )
        return pods[-1] if pods else None

    def _tail(self, pod: PodFacts | None, count: int) -> Iterator[str]:
        if pod is None:
            return
        try:
            lines = self._last_lines(pod, min(count, _MOST_LINES))
        except (MissingError, NoLogError) as error:
            self._check_gone(pod, error)
            return
        yield from [line.text for line in lines][-count:]

    def _last_lines(self, pod: PodFacts, count: int) -> list[Line]:
        """Return at least the last lines, without those of a result.

        The kubelet counts pieces of 16 KiB, and may begin in the middle of a line.
        """
        report = read_message(pod)
        pieces_asked = count + 1 + (0 if report is None else report.result_lines)
        before = None
        while True:
            read = partial(self._read_last, pod, pieces_asked, count + 1)
            lines, pieces_most = result = self._patiently(read)
            if len(lines) > count or pieces_most < pieces_asked or result == before:
                return lines
            pieces_asked, before = pieces_asked * 4, result

    def _read_last(self, pod: PodFacts, pieces_asked: int, most: int) -> tuple[list[Line], int]:
        """Return the last lines among a number of pieces, and how many pieces came at most.

        Lines of a result are left out.
        """
        lines, pieces_most = deque[Line](maxlen=most), 0
        for line in self._source.lines(pod.name, tail=pieces_asked):
            pieces_most += 1 + len(line.text) // _LEAST_PIECE
            if not is_result_line(line.text):
                lines.append(line)
        return list(lines), pieces_most

    def _once(self, pod: PodFacts | None, place: Place) -> Iterator[Line]:
        try:
            while pod is not None and not (yield from self._stream(pod, place, follow=False)):
                pass
        except (MissingError, NoLogError) as error:
            if pod is not None:
                self._check_gone(pod, error)

    def _check_gone(self, pod: PodFacts, error: BackendError) -> None:
        """Raise an error if a log that is gone, or cannot be read, would look empty.

        If the attempt has yet to come, nothing is gone.

        Raises:
            ReplicaNotFoundError: There will be no other attempt, or a certain attempt was
                requested.
            NoLogError: The log may exist; the wait for it is over.
        """
        last = self._attempt is not None or self._patiently(self._source.terminal)
        if isinstance(error, NoLogError) and not (last and pod.over):
            raise error
        if last:
            raise ReplicaNotFoundError(f"the log of pod {pod.name} is gone: {error}") from error

    def _follow(self, pod: PodFacts | None) -> Iterator[Line]:
        """Yield the lines of one attempt after the other, until the replica has ended."""
        query, source, place, done = self._query, self._source, Place(), set[str]()
        fixed = self._attempt is not None

        def ended() -> bool:
            return fixed or self._patiently(source.terminal)

        def read(last: bool) -> Generator[Line, None, Look]:
            nonlocal pod, place
            # The clock is read before the log, so all lines written before that time are in the
            # log.
            late = query.until is not None and source.clock() >= query.until
            pods = self._patiently(source.pods)
            name = None if pod is None else pod.name
            current = next((each for each in pods if each.name == name), None)
            if current is not None:
                try:
                    whole = yield from self._stream(current, place, follow=not late)
                except MissingError:
                    whole = True  # the next look finds that the log is gone
                except NoLogError:
                    if last or not current.over:
                        raise
                    whole = True  # do not wait for it, since the next attempt is to come
                if not whole or not (current.over or late):
                    self._pause()
                    return Look(fresh=True, whole=False)
            if fixed or (current is not None and not current.over):
                return Look(fresh=False)
            if name is not None:
                done.add(name)
            newer = [each for each in pods if each.name not in done and not _older(each, pod)]
            if newer:
                pod, place = newer[0], Place()
                self._outage.over()
            return Look(fresh=bool(newer), whole=not newer)

        pauses = replace(source.backoff, cap=source.backoff.first)
        yield from follow(query, read, ended, pauses, source.clock)

    def _stream(self, pod: PodFacts, place: Place, *, follow: bool) -> Generator[Line, None, bool]:
        """Yield the lines that were not read yet; return whether the log was read to its end.

        If not, the connection broke and must be opened again.
        """
        try:
            with self._in_time(follow=follow):
                lines = self._source.lines(pod.name, follow=follow, tail=place.tail)
            for line in place.fresh(lines):
                self._outage.over()
                yield line
        except MissingError:
            raise
        except BackendError as error:
            # A silent container writes nothing, so the connection is opened again and again.
            if follow and pod.live and (place.answered or isinstance(error, SilentError)):
                self._outage.over()
            self._outage.goes_on(error)
            return False
        self._outage.over()
        return not place.lost

    def _in_time(self, *, follow: bool) -> contextlib.AbstractContextManager[None]:
        """Limit the wait for a silent pod to the time at which following ends."""
        source, until = self._source, self._query.until
        if not follow or until is None:
            return contextlib.nullcontext()
        return source.cluster.client.until(until, source.clock)

    def _patiently(self, call: Callable[[], T]) -> T:
        return retry(call, self._source.backoff, timeout=self._source.patience)

    def _pause(self) -> None:
        self._source.backoff.sleep(self._source.backoff.first)


def _older(one: PodFacts, other: PodFacts | None) -> bool:
    """Return whether a pod is older than another, and not the last one of its replica."""
    if other is None or one.is_last:
        return False
    return (one.created, one.attempt) < (other.created, other.attempt)

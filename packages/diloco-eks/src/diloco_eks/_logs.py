"""Reading a replica's log: of the right attempt, from a time on, as it is written, across broken connections."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from diloco_protocol import (
    BackendError,
    InvalidRequestError,
    LogQuery,
    ReplicaNotFoundError,
    UnavailableError,
    is_result_line,
)
from diloco_protocol.backend import check_whole

from ._client import pieces
from ._cluster import Cluster
from ._errors import BadRequestError, MissingError
from ._facts import PodFacts, pods_by_index, read_pod
from ._lines import Line, Place, split_lines
from ._names import CONTROLLER_UID, INDEX
from ._verdict import read_message


@dataclass(frozen=True, slots=True)
class LogSource:
    """Where the log of one replica is.

    Attributes:
        cluster: To ask.
        namespace: The namespace of the pods.
        job_uid: The uid of the Job whose pods are read.
        index: The replica's index in the Job.
        terminal: Tells whether the replica has ended for good.
        clock: Unix seconds.
        pause: Sleeps a while between two looks.
    """

    cluster: Cluster
    namespace: str
    job_uid: str
    index: int
    terminal: Callable[[], bool]
    clock: Callable[[], float]
    pause: Callable[[], None]

    def pods(self) -> list[PodFacts]:
        """The replica's pods, the newest last."""
        selector = f"{CONTROLLER_UID}={self.job_uid},{INDEX}={self.index}"
        all_pods = [read_pod(pod) for pod in self.cluster.list_pods(self.namespace, selector)]
        return pods_by_index(all_pods).get(self.index, [])

    def lines(
        self, pod: str, *, follow: bool = False, since: float | None = None, tail: int | None = None
    ) -> Iterator[Line]:
        """The lines of one pod's log; none if its container has not started yet.

        Raises:
            MissingError: The pod is gone.
            UnavailableError: The connection broke.
        """
        query: dict[str, object] = {"follow": True} if follow else {}
        if since is not None:
            query["since_seconds"] = max(1, math.ceil(self.clock() - since) + 1)
        if tail is not None:
            query["tail_lines"] = tail
        try:
            response = self.cluster.open_log(self.namespace, pod, **query)
        except BadRequestError:  # "... is waiting to start"
            return
        yield from split_lines(pieces(f"read the log of pod {pod}", response))


class PodLog(Iterator[str]):
    """The lines that were asked for; nothing is read before the first.

    Args:
        source: Where the log is.
        query: Which lines.
    """

    def __init__(self, source: LogSource, query: LogQuery) -> None:
        self._source = source
        self._query = query
        self._attempt: int | None = None
        self._previous = False
        self._lines: Iterator[str] | None = None

    def of(self, attempt: int | None, *, previous: bool) -> PodLog:
        """The same lines of an attempt other than the newest."""
        check_whole("attempt", attempt, 1, none=True)
        if attempt is not None and previous:
            raise InvalidRequestError("give attempt= or previous=, not both")
        self._attempt, self._previous = attempt, previous
        return self

    def __next__(self) -> str:
        if self._lines is None:
            self._lines = self._read()
        return next(self._lines)

    def _read(self) -> Iterator[str]:
        query, source = self._query, self._source
        pod = self._choose(source.pods())
        if query.n_lines is not None:
            yield from self._tail(pod, query.n_lines)
            return
        pattern = None if query.regex is None else re.compile(query.regex)
        lines = self._follow(pod) if query.follow else self._once(pod, Place())
        for line in lines:
            if is_result_line(line.text) or (
                pattern is not None and pattern.search(line.text) is None
            ):
                continue
            time = line.time
            if time is not None and query.since is not None and time < query.since:
                continue
            if time is not None and query.until is not None and time >= query.until:
                return
            yield line.text

    def _choose(self, pods: list[PodFacts]) -> PodFacts | None:
        """The pod to read; None if it does not exist yet."""
        if self._attempt is not None or self._previous:
            fitting = (
                [pod for pod in pods if pod.attempt == self._attempt]
                if self._attempt
                else pods[:-1]
            )
            if not fitting:
                which = f"of attempt {self._attempt}" if self._attempt else "of an earlier attempt"
                attempts = ", ".join(str(pod.attempt) for pod in pods) or "none"
                raise ReplicaNotFoundError(
                    f"there is no log {which}; the cluster has those of attempts: {attempts}"
                )
            return fitting[-1]
        if not pods and self._source.terminal():
            raise ReplicaNotFoundError(
                "the replica's pod has been removed, and its log with it: Kubernetes keeps no log of pods that it ends"
            )
        return pods[-1] if pods else None

    def _tail(self, pod: PodFacts | None, count: int) -> Iterator[str]:
        if pod is None:
            return
        report = read_message(pod)
        extra = 0 if report is None else report.result_lines
        lines = [
            line.text
            for line in self._open(pod, tail=count + extra)
            if not is_result_line(line.text)
        ]
        yield from lines[-count:]

    def _once(self, pod: PodFacts | None, place: Place) -> Iterator[Line]:
        if pod is not None:
            yield from place.fresh(self._open(pod, since=self._query.since))

    def _open(self, pod: PodFacts, **how: object) -> Iterator[Line]:
        try:
            yield from self._source.lines(pod.name, **how)  # type: ignore[arg-type]
        except MissingError:
            raise ReplicaNotFoundError(
                f"the pod {pod.name} has been removed, and its log with it"
            ) from None

    def _follow(self, pod: PodFacts | None) -> Iterator[Line]:
        """One attempt after the other, until the replica has ended and all was read."""
        place = Place()
        fixed = self._attempt is not None or self._previous
        while True:
            ended = self._source.terminal()
            pods = self._source.pods()
            current = next(
                (candidate for candidate in pods if pod is not None and candidate.name == pod.name),
                None,
            )
            if current is not None:
                over = not current.live or current.terminated is not None
                yield from self._stream(current, place)
                if not over:
                    self._source.pause()
                    continue
            newer = (
                []
                if fixed
                else [candidate for candidate in pods if pod is None or _younger(candidate, pod)]
            )
            if newer:
                pod, place = newer[0], Place()
                continue
            if ended or (fixed and current is None) or (fixed and over):
                return
            if self._query.until is not None and self._source.clock() >= self._query.until:
                return
            self._source.pause()

    def _stream(self, pod: PodFacts, place: Place) -> Iterator[Line]:
        since = Line(place.stamp, "").time if place.stamp else self._query.since
        try:
            yield from place.fresh(self._source.lines(pod.name, follow=True, since=since))
        except MissingError:
            return  # the next look sees that it is gone
        except UnavailableError:
            return  # a connection that broke is opened again
        except BackendError:
            raise


def _younger(one: PodFacts, other: PodFacts) -> bool:
    return one.name != other.name and (one.created, one.attempt) >= (other.created, other.attempt)

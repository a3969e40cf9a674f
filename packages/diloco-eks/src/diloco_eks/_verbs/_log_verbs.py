"""The verbs that read logs, with arguments for attempts, which only Kubernetes has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import cast

from diloco_protocol import BaseExecutor, LogQuery, ReplicaHandle
from diloco_protocol.backend import check_whole

from .._client._cluster import Cluster
from .._state._handles import index_of
from ._logs import LogSource, PodLog
from ._runs import Runs


class LogVerbs(BaseExecutor):
    """The part of the executor that reads logs."""

    _cluster: Cluster
    _runs: Runs
    _clock: Callable[[], float]

    def stream_logs(
        self, handle: ReplicaHandle, *, n_lines: int = 200, attempt: int | None = None
    ) -> str:
        """Return the last lines of a replica's log; see :meth:`BaseExecutor.stream_logs`.

        Args:
            handle: The replica.
            n_lines: Number of lines, at most. A runtime that writes lines in pieces of less than 4
                KiB (containerd's have 16) may cause fewer to be returned.
            attempt: Number of the attempt to read; None for the newest.

        Raises:
            ReplicaNotFoundError: There is no such log, or it is gone: Kubernetes removes the logs
                of pods that it ends itself.
            UnavailableError: The replica's node could not read the log for ``retry_timeout``
                seconds.
        """
        if attempt is None:
            return super().stream_logs(handle, n_lines=n_lines)
        self._check(handle)
        check_whole("n_lines", n_lines, 1)
        log = self._patiently(lambda: self._logs(handle, LogQuery(n_lines=n_lines)))
        return "\n".join(log.of(attempt))

    def log_iter(
        self,
        handle: ReplicaHandle,
        *,
        follow: bool = False,
        since: float | None = None,
        until: float | None = None,
        regex: str | None = None,
        streams: str = "combined",
        attempt: int | None = None,
    ) -> Iterator[str]:
        """Yield the lines of a replica's log; see :meth:`BaseExecutor.log_iter`.

        Args:
            handle: The replica.
            follow: Whether to continue through further attempts until the replica has ended.
            since: Only lines from this time on, in Unix seconds.
            until: Only lines before this time, in Unix seconds.
            regex: Only lines in which this regular expression is found.
            streams: ``"combined"``; Kubernetes keeps the two streams in one log.
            attempt: Number of the only attempt to read; None for the newest.
        """
        lines = super().log_iter(
            handle, follow=follow, since=since, until=until, regex=regex, streams=streams
        )
        return cast("PodLog", lines).of(attempt)

    def _logs(self, handle: ReplicaHandle, query: LogQuery) -> PodLog:
        return PodLog(self._source(handle), query)

    def _source(self, handle: ReplicaHandle) -> LogSource:
        facts = self._runs.job(handle)
        return LogSource(
            self._cluster, handle.metadata["namespace"], facts.uid, index_of(handle, facts),
            partial(self._has_ended, handle), self._clock, self._backoff, self._patience,
        )  # fmt: skip

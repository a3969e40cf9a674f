"""The verbs by which replicas are watched: states, logs, and waiting for their ends."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from ._checks import check_callable, check_seconds, check_whole, is_number, or_none, shown
from ._collect import Progress, by_run, collect
from ._errors import InvalidRequestError, ReplicaNotFoundError
from ._hooks import LogQuery
from ._journaled import Journaled
from ._kept_logs import logs_until

if TYPE_CHECKING:
    from ._handle import ReplicaHandle
    from ._types import ReplicaResult, ReplicaState, ReplicaStatus

_LATEST = 253_402_214_400.0
"""The last day of the year 9999 in Unix seconds (UTC); calendars of every time zone can show it."""


class Watched(Journaled):
    """The part of :class:`BaseExecutor` that watches replicas."""

    _failures: dict[ReplicaHandle, int]
    """How often ``collect`` has seen failed replicas while others went on."""

    def poll(self, handle: ReplicaHandle) -> ReplicaState:
        """Return the state of a replica: ``describe(handle).state``."""
        return self.describe(handle).state

    def describe(self, handle: ReplicaHandle) -> ReplicaStatus:
        """Return everything that is known about a replica.

        Raises:
            ReplicaNotFoundError: There is no record of it, here or in the journal.
            InvalidRequestError: The backend has no record of it, and the journal's record is
                damaged.
            BackendError: The backend could not be queried.
        """
        self._check(handle)
        gone: ReplicaNotFoundError | None = None
        try:
            status = self._patiently(lambda: self._observe([handle])).get(handle)
        except ReplicaNotFoundError as error:
            status, gone = None, error
        if status is None:
            if (damage := self._damage(handle)) is not None:
                raise damage
            raise ReplicaNotFoundError(self._missing(handle, gone)) from gone
        return status

    def describe_run(self, handles: Iterable[ReplicaHandle]) -> dict[ReplicaHandle, ReplicaStatus]:
        """Return everything that is known about replicas of a run, as :meth:`describe` does.

        The backend is asked about all of them together, as far as it can be
        (``capabilities.calls_per_look``). A replica without a record is left out;
        :meth:`describe` says why there is none. Replicas of several runs take a look for each run.

        Raises:
            BackendError: The backend could not be queried.
        """
        handles = _listed("describe_run", handles)
        for handle in handles:
            self._check(handle)
        statuses: dict[ReplicaHandle, ReplicaStatus] = {}
        for run in by_run(handles, self._place):
            with contextlib.suppress(ReplicaNotFoundError):
                statuses.update(self._patiently(partial(self._observe, run)))
        return statuses

    def stream_logs(self, handle: ReplicaHandle, *, n_lines: int = 200) -> str:
        """Return the last lines of a replica's log; ``""`` if there are none.

        Raises:
            ReplicaNotFoundError: There is no record of it.
        """
        self._check(handle)
        check_whole("n_lines", n_lines, 1)
        query = LogQuery(n_lines=n_lines)
        # Some hooks read only when they are asked for lines.
        return self._patiently(lambda: "\n".join(self._logs(handle, query)))

    def log_iter(
        self,
        handle: ReplicaHandle,
        *,
        follow: bool = False,
        since: float | None = None,
        until: float | None = None,
        regex: str | None = None,
        streams: str = "combined",
    ) -> Iterator[str]:
        """Yield the lines of a replica's log, without their line ends.

        No state is kept between calls.

        Args:
            handle: The replica.
            follow: Whether to continue until the replica has ended and its log is exhausted.
            since: Only lines from this time on, in Unix seconds. A time before 1970 selects all
                lines.
            until: Only lines before this time, in Unix seconds.
            regex: Only lines in which this regular expression is found. It is Python's ``re``,
                which cannot be interrupted: an expression with nested repetitions, such as
                ``(a+)+$``, may take forever on one line of up to 1 MiB. Do not use an expression
                that comes from an untrusted source.
            streams: ``"stdout"``, ``"stderr"`` or ``"combined"``.

        Raises:
            InvalidRequestError: The backend does not have that stream, or an argument is wrong (a
                ``ValueError``).
            ReplicaNotFoundError: There is no record of the replica.
        """
        self._check(handle)
        if streams not in self.capabilities.log_streams:
            raise InvalidRequestError(
                f"{self.backend_name} has no log stream {shown(streams)}; it has "
                f"{', '.join(self.capabilities.log_streams)}"
            )
        for name, value in (("since", since), ("until", until)):
            if value is not None and not is_number(value):
                raise InvalidRequestError(
                    f"{name} must be a Unix time in seconds or None, not {shown(value)}"
                )
        if regex is not None:
            try:
                if not isinstance(regex, str):  # bytes would be compiled, and then match no line
                    raise TypeError("it must be text")
                re.compile(regex)
            except (re.error, TypeError, ValueError, OverflowError, RecursionError) as error:
                raise InvalidRequestError(
                    f"regex={shown(regex)} is not a regular expression: {error}"
                ) from None
        query = LogQuery(
            follow=follow,
            since=_sayable(since),
            until=_sayable(until),
            regex=regex,
            streams=streams,
        )
        return self._patiently(lambda: self._logs(handle, query))

    def collect(
        self,
        handles: Sequence[ReplicaHandle],
        *,
        timeout: float | None = None,
        progress: Progress | None = None,
    ) -> list[ReplicaResult]:
        """Wait until all replicas are terminal or the time is up.

        Ends nothing, and may be repeated. A warning in the log says once which replica has failed
        for good while others of its run go on.

        Args:
            handles: Handles in any order, of any runs of this backend.
            timeout: Seconds for all of them together; None for no limit.
            progress: Called from time to time with the statuses that are known so far.

        Returns:
            One result per handle, in the given order. A replica without a record is failed with
            reason ``lost``. A success whose result is gone has the result None and an ``error``
            that says so.

        Raises:
            InvalidRequestError: One of the handles is not a handle, or belongs elsewhere; the call
                did not wait.
        """
        handles = _listed("collect", handles)
        if progress is not None:
            check_callable("progress", progress)
        # Infinity is another way to say None; every other value that is not finite is refused.
        limit = None if timeout == math.inf else or_none(check_seconds)("timeout", timeout)
        begun = self._backoff.clock()
        deadline = math.inf if limit is None else begun + limit
        with self._within(limit), logs_until(deadline):
            for handle in handles:
                self._check(handle)  # a backend may have to ask to whom its credentials belong
            ends = self._ends(handles)
            passed = self._backoff.clock() - begun
            return collect(
                handles,
                self._observe_or_lost,
                self._result_of,
                place_of=self._place,
                ends=ends,
                timeout=None if limit is None else max(0.0, limit - passed),
                backoff=self._backoff,
                progress=progress,
                warned=self._failures if self.capabilities.failure_scope == "replica" else None,
            )


def _listed(verb: str, handles: Iterable[ReplicaHandle]) -> list[ReplicaHandle]:
    """Return handles as a list, since a generator can be read only once."""
    if not isinstance(handles, Iterable):
        raise InvalidRequestError(f"{verb} takes a list of handles, not {shown(handles)}")
    return list(handles)


def _sayable(moment: float | None) -> float | None:
    """Limit a time to 1970 to 9999, which every clock and calendar can represent.

    No log has lines before or after that.
    """
    return None if moment is None else min(max(moment, 0.0), _LATEST)

"""Logs that a journal keeps, since some backends remove them when a replica is cancelled."""

from __future__ import annotations

import math
from collections import deque
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock
from typing import TYPE_CHECKING, TypeVar

from ._backoff import no_try_after, retry
from ._cancel import MAX_THREADS
from ._checks import shown
from ._collect import log
from ._errors import (
    BackendError,
    DilocoError,
    InvalidRequestError,
    ReplicaNotFoundError,
    SpecVersionError,
)
from ._handle import ReplicaHandle
from ._hooks import Hooks, LogQuery
from ._journal_records import LOG_BYTES, DamagedRecordError
from ._redact import redact_text
from ._request import is_run_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ._backoff import Backoff
    from ._journal import RunJournal

T = TypeVar("T")

KEPT_LOGS = 256
"""Logs are kept of the ranks below this number."""
_LINES = 5000
LOG_SECONDS = 10.0
"""Seconds for which all logs together are waited for."""

_until: ContextVar[float] = ContextVar("when logs are waited for no longer", default=math.inf)


@contextmanager
def logs_until(moment: float) -> Iterator[None]:
    """Wait for logs no longer than until that moment in this thread, such as collect's deadline."""
    before = _until.set(moment)
    try:
        yield
    finally:
        _until.reset(before)


class KeptLogs(Hooks):
    """The part of :class:`BaseExecutor` that hands the ends of logs to a journal."""

    _journal: RunJournal | None
    _backoff: Backoff
    _patience: float

    def _patiently(self, call: Callable[[], T]) -> T:
        """Return what ``call`` returns; repeat it while its errors may pass and patience lasts."""
        return retry(call, self._backoff, timeout=self._patience) if self._patience else call()

    def _check(self, handle: ReplicaHandle) -> None:
        """Refuse anything that is not a handle of this executor, with InvalidRequestError."""
        if not isinstance(handle, ReplicaHandle):
            raise InvalidRequestError(
                f"this is not a ReplicaHandle: {shown(handle)}. ReplicaHandle.from_dict and "
                "from_json make one of what to_dict and to_json gave"
            )
        if handle.backend_name != self.backend_name:
            raise InvalidRequestError(
                f"this handle belongs to the backend {shown(handle.backend_name)}, and this "
                f"executor is for {self.backend_name!r}"
            )
        # A run_id becomes part of paths and names of objects, and any program may have written the
        # handle.
        if not is_run_id(handle.run_id):
            raise InvalidRequestError(
                f"this handle of rank {handle.rank} names the run {shown(handle.run_id)}, and no "
                "launch gives a run such a name"
            )
        self._check_handle(handle)

    def _takes(self, handle: ReplicaHandle) -> bool:
        """Return whether this executor's verbs accept a handle."""
        try:
            self._check(handle)
        except InvalidRequestError:
            return False
        return True

    def kept_log(self, handle: ReplicaHandle) -> str | None:
        """Return the end of a replica's log that the journal keeps; None if it keeps none.

        An executor with this journal has read it before it cancelled or purged the replica, or when
        it first saw the end: at most the last MiB, without what looks like a secret, of ranks below
        256. A damaged record counts as missing, and a warning is logged.

        Raises:
            BackendError: The journal cannot be read.
        """
        self._check(handle)
        read: Callable[[ReplicaHandle], str | None] | None = getattr(self._journal, "log", None)
        try:
            return None if read is None else read(handle)
        except (DamagedRecordError, SpecVersionError) as error:
            log(str(error))
            return None

    def _read_logs(
        self, handles: Sequence[ReplicaHandle], deadline: float | None = None
    ) -> dict[ReplicaHandle, str]:
        """Return the ends of logs for the journal, if it takes any, as far as they come in time."""
        wanted = [handle for handle in handles if handle.rank < KEPT_LOGS]
        if not wanted or not hasattr(self._journal, "keep_log"):
            return {}
        from concurrent.futures import ThreadPoolExecutor  # slow to import

        clock = self._backoff.clock
        deadline = clock() + LOG_SECONDS if deadline is None else deadline
        until = min(deadline, _until.get())

        # Redaction takes up to a second each. All threads at it would be long past the deadline.
        one_redacts = Lock()

        def read(handle: ReplicaHandle) -> str:
            end = self._end_of_log(handle, until) if clock() < deadline else ""
            with one_redacts:
                return redact_text(end) if clock() < deadline else ""

        with ThreadPoolExecutor(min(len(wanted), MAX_THREADS)) as threads:
            return dict(zip(wanted, threads.map(read, wanted), strict=True))

    def _end_of_log(self, handle: ReplicaHandle, until: float) -> str:
        """Return the last lines of a log; empty if there are none, or not by that time."""
        lines: deque[str] = deque()
        size = 0
        try:
            left = max(0.0, until - self._backoff.clock())
            with self._within(left), no_try_after(until):
                query = LogQuery(n_lines=_LINES)
                for line in self._patiently(lambda: self._logs(handle, query)):
                    lines.append(line)
                    size += len(line) + 1
                    while size > LOG_BYTES and len(lines) > 1:
                        size -= len(lines.popleft()) + 1
        except ReplicaNotFoundError:  # there is none
            return ""
        except DilocoError as error:
            log(f"the log of rank {handle.rank} of run {handle.run_id!r} is not kept: {error}")
            return ""
        return "".join(f"{line}\n" for line in lines)

    def _keep_logs(self, logs: Mapping[ReplicaHandle, str]) -> None:
        """Write the ends of logs into the journal."""
        keep: Callable[[ReplicaHandle, str], None] | None = getattr(self._journal, "keep_log", None)
        for handle, text in logs.items():
            try:
                if text and keep is not None:
                    keep(handle, text)
            except BackendError as error:
                of = f"the log of rank {handle.rank} of run {handle.run_id!r}"
                log(f"{of} is not in the journal: {error}")

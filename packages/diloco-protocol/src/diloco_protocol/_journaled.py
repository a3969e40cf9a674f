"""What a journal adds to what a backend says: ends that it remembers, and that are written down when they are first seen."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ._collect import RESULT_LOST
from ._errors import BackendError, ReplicaNotFoundError, ResultLostError
from ._hooks import Hooks
from ._texts import readable_status

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ._handle import ReplicaHandle
    from ._journal import RunJournal
    from ._types import ReplicaStatus


class Journaled(Hooks):
    """The part of :class:`BaseExecutor` that asks a journal before the backend, if there is one."""

    _journal: RunJournal | None

    def _observe(self, handles: Sequence[ReplicaHandle]) -> Mapping[ReplicaHandle, ReplicaStatus]:
        """What the journal knows to have ended, and what the backend says of the rest; writes down what has ended."""
        if self._journal is None:
            return self._readable(handles)
        ends = {handle: self._journal.end(handle) for handle in handles}
        seen = {handle: readable_status(end[0]) for handle, end in ends.items() if end is not None}
        asked = [handle for handle in handles if handle not in seen]
        if asked:
            try:
                seen.update(self._readable(asked))
            except ReplicaNotFoundError:
                if not seen:
                    raise
        for handle in asked:
            if handle in seen and seen[handle].state.terminal:
                self._record_end(self._journal, handle, seen[handle])
        return seen

    def _readable(self, handles: Sequence[ReplicaHandle]) -> Mapping[ReplicaHandle, ReplicaStatus]:
        seen = self._observe_run(handles)
        return {handle: readable_status(status) for handle, status in seen.items()}

    def _record_end(
        self, journal: RunJournal, handle: ReplicaHandle, status: ReplicaStatus
    ) -> None:
        try:
            try:
                result = self._result(handle) if status.state == "succeeded" else None
            except (ResultLostError, ReplicaNotFoundError) as lost:
                result, status = None, replace(status, message=f"{RESULT_LOST}{lost}")
            journal.record_end(handle, status, result)
        except BackendError as error:
            # The state is known and true; who looks next tries again to write it down.
            import logging  # slow to import

            logging.getLogger("diloco_protocol").warning(
                "the end of rank %s of run %r is not in the journal yet: %s",
                handle.rank,
                handle.run_id,
                error,
            )

    def _result_of(self, handle: ReplicaHandle) -> Any:
        recorded = None if self._journal is None else self._journal.end(handle)
        if recorded is None:
            return self._result(handle)
        status, result = recorded
        if status.message.startswith(RESULT_LOST):
            raise ResultLostError(status.message.removeprefix(RESULT_LOST))
        return result

    def _missing(self, handle: ReplicaHandle, error: ReplicaNotFoundError | None) -> str:
        """What was asked for and where, when neither the backend nor a journal knows a replica, and what to do."""
        where = ", ".join(f"{name}={value!r}" for name, value in handle.metadata.items())
        kept, journal = self.capabilities.retention, self._journal
        return (
            f"{self.backend_name} has no record of rank {handle.rank} of run {handle.run_id!r} ({where or 'no metadata'})"
            + (f": {error}" if error is not None and str(error) else "")
            + (f". Nor has the journal {journal!r} its end" if journal is not None else "")
            + ". It was purged, "
            + (f"ended more than {_in_words(kept)} ago, " if kept is not None else "")
            + "or was never launched where this executor looks. list_runs() names the runs that are there"
            + (
                ""
                if journal is not None
                else "; a journal would remember how it ended: give one to the constructor"
            )
        )


def _in_words(seconds: float) -> str:
    """A span of time in the largest unit of which it is a whole number."""
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= length and seconds % length == 0:
            count = int(seconds // length)
            return f"{count} {unit}{'s' * (count > 1)}"
    return f"{seconds:g} s"

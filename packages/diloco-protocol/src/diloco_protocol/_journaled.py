"""Journal support for executors.

The journal remembers how replicas ended, and ends are written into it when they are first seen.
A journal of this user's own comes before what the backend says. One into which others can write
comes after it: its ends count only where the backend has no record of the replica.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ._backoff import no_try_after
from ._cancel import check_ended
from ._checks import shown
from ._collect import RESULT_LOST, log
from ._errors import (
    BackendError,
    DilocoError,
    ReplicaNotFoundError,
    ResultLostError,
    SpecVersionError,
)
from ._journal import is_believed
from ._journal_records import DamagedRecordError
from ._kept_logs import LOG_SECONDS, KeptLogs
from ._recent import LookOrder
from ._texts import readable_status
from ._types import Reason, ReplicaState, ReplicaStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ._handle import ReplicaHandle
    from ._journal import RunJournal


class Journaled(KeptLogs):
    """The part of :class:`BaseExecutor` that reads a journal, if any, before the backend."""

    _looks: LookOrder
    _warned_of: set[ReplicaHandle]
    """Replicas whose damaged records have been logged; each is logged once."""
    _noted: set[ReplicaHandle]
    """Replicas whose ends this executor has written into the journal."""

    def _is_ours(self, handle: ReplicaHandle) -> bool:
        """Return whether a journal's handle belongs to the place where this executor looks."""
        return self._takes(handle)

    def _observe(self, handles: Sequence[ReplicaHandle]) -> Mapping[ReplicaHandle, ReplicaStatus]:
        """Return the statuses of replicas: ends from the journal, everything else from the backend.

        Ends that are new are written into the journal.
        """
        if self._journal is None:
            return self._readable(handles)
        seen = self._ends(handles)
        rest = [handle for handle in handles if handle not in seen]
        gone: ReplicaNotFoundError | None = None
        if rest:
            try:
                seen.update(self._readable(rest))
            except ReplicaNotFoundError as error:
                gone = error
        ended = [handle for handle in rest if handle in seen and seen[handle].state.terminal]
        new = [handle for handle in ended if self._record_end(self._journal, handle, seen[handle])]
        self._keep_logs(self._read_logs(new))
        if not is_believed(self._journal):
            seen.update(self._all_recorded([handle for handle in rest if handle not in seen]))
        if gone is not None and not seen:
            raise gone
        return seen

    def _has_ended(self, handle: ReplicaHandle) -> bool:
        """Return whether a replica has ended, or is gone."""
        try:
            status = self._observe([handle]).get(handle)
        except ReplicaNotFoundError:
            status = None
        return status is None or status.state.terminal

    def _ends(self, handles: Sequence[ReplicaHandle]) -> dict[ReplicaHandle, ReplicaStatus]:
        """Return the ends that are known before the backend is asked."""
        return self._all_recorded(handles) if is_believed(self._journal) else {}

    def _all_recorded(self, handles: Sequence[ReplicaHandle]) -> dict[ReplicaHandle, ReplicaStatus]:
        ends = {handle: self._recorded(handle) for handle in handles}
        return {handle: readable_status(end[0]) for handle, end in ends.items() if end is not None}

    def _observe_or_lost(
        self, handles: Sequence[ReplicaHandle]
    ) -> Mapping[ReplicaHandle, ReplicaStatus]:
        """Observe replicas as :meth:`_observe` does, for ``collect``.

        A replica that is gone and whose journal record is damaged counts as lost.
        """
        try:
            seen = dict(self._observe(handles))
        except ReplicaNotFoundError:
            if self._journal is None:
                raise
            seen = {}
        for handle in handles:
            if handle not in seen and (damage := self._damage(handle)) is not None:
                text = (
                    f"how rank {handle.rank} of run {handle.run_id!r} ended is not known: {damage}"
                )
                seen[handle] = ReplicaStatus(ReplicaState.FAILED, reason=Reason.LOST, message=text)
        return seen

    def _recorded(self, handle: ReplicaHandle) -> tuple[ReplicaStatus, Any] | None:
        """Return the end of a replica that is in the journal.

        A damaged record counts as missing, and a warning is logged.
        """
        end = self._looked_up(handle)
        if not isinstance(end, DilocoError):
            return end
        if handle not in self._warned_of:
            self._warned_of.add(handle)
            log(str(end))
        return None

    def _damage(self, handle: ReplicaHandle) -> DilocoError | None:
        """Return what is wrong with the journal's record of a replica's end; None if nothing is."""
        end = self._looked_up(handle)
        return end if isinstance(end, DilocoError) else None

    def _looked_up(self, handle: ReplicaHandle) -> tuple[ReplicaStatus, Any] | DilocoError | None:
        try:
            return None if self._journal is None else self._journal.end(handle)
        except (DamagedRecordError, SpecVersionError) as error:
            return error

    def _readable(self, handles: Sequence[ReplicaHandle]) -> Mapping[ReplicaHandle, ReplicaStatus]:
        with self._looks.look() as number:
            seen = self._observe_run(handles)
            return {
                handle: self._looks.newest(number, handle, readable_status(status))
                for handle, status in seen.items()
            }

    def _record_end(
        self, journal: RunJournal, handle: ReplicaHandle, status: ReplicaStatus
    ) -> bool:
        """Write an end into the journal; return whether it was not there before."""
        if handle in self._noted:
            return False
        try:
            is_new = self._is_new(handle, status)
            self._write_end(journal, handle, status)
        except BackendError as error:
            # The state is known and true; the next look tries again to write it into the journal.
            of = f"the end of rank {handle.rank} of run {handle.run_id!r}"
            log(f"{of} is not in the journal yet: {error}")
            return False
        self._noted.add(handle)
        return is_new

    def _is_new(self, handle: ReplicaHandle, status: ReplicaStatus) -> bool:
        """Return whether an end is not in the journal yet; a stranger may have forged another."""
        before = self._recorded(handle)
        return before is None or before[0].state is not status.state

    def _write_end(self, journal: RunJournal, handle: ReplicaHandle, status: ReplicaStatus) -> None:
        try:
            result = self._result(handle) if status.state == "succeeded" else None
        except (ResultLostError, ReplicaNotFoundError) as lost:
            result, status = None, replace(status, message=f"{RESULT_LOST}{lost}")
        journal.record_end(handle, status, result)

    def _logs_before_cancel(self, handle: ReplicaHandle) -> dict[ReplicaHandle, str]:
        """Return the ends of the logs of those that a cancel ends, for the journal."""
        if self._journal is None or self.capabilities.cancel_scope != "gang":
            return self._read_logs([handle])
        deadline = self._backoff.clock() + LOG_SECONDS
        try:
            with no_try_after(deadline):
                run = self._run_of(self._journal, handle)
            return self._read_logs(run, deadline)
        except DilocoError as error:
            log(f"the logs of run {handle.run_id!r} are not kept: {error}")
            return {}

    def _write_last_ends(self, journal: RunJournal, handle: ReplicaHandle) -> None:
        """Write the ends of a run that is about to be removed into the journal.

        After the removal they could not be read any more.

        Raises:
            InvalidRequestError: A replica has not ended.
            BackendError: The backend could not be queried, or the journal could not be written.
        """
        run = self._run_of(journal, handle)
        believed = is_believed(journal)
        rest = [replica for replica in run if not believed or self._recorded(replica) is None]
        try:
            seen = self._readable(rest) if rest else {}
        except ReplicaNotFoundError:
            return
        alive = [replica.rank for replica, status in seen.items() if not status.state.terminal]
        check_ended(handle.run_id, alive)
        new = [replica for replica, status in seen.items() if self._is_new(replica, status)]
        self._keep_logs(self._read_logs(new))
        for replica, status in seen.items():
            try:
                if believed and (damage := self._damage(replica)) is not None:
                    raise damage  # a damaged record is not replaced
                self._write_end(journal, replica, status)
            except DilocoError as error:
                error.add_note(
                    f"run {handle.run_id!r} is not removed, since the end of rank {replica.rank} "
                    "could not be written into the journal. An executor without a journal removes "
                    "it"
                )
                raise
        self._spell_out(journal, run)

    def _spell_out(self, journal: RunJournal, run: Sequence[ReplicaHandle]) -> None:
        """Write a run's ends under the journal's own handles too, if they have other metadata."""
        launched = set(self._launched(journal, run[0], self._takes)) - set(run)
        ends = {replica.rank: self._recorded(replica) for replica in run} if launched else {}
        for other in self._spelled(run[0], list(launched)) if launched else []:
            if (end := ends.get(other.rank)) is not None and self._recorded(other) is None:
                journal.record_end(other, *end)

    def _run_of(self, journal: RunJournal, handle: ReplicaHandle) -> list[ReplicaHandle]:
        """Return the handles of a replica and its siblings, from the journal or the backend."""
        # A stranger's launch might leave ranks out, which would then not be asked about.
        known = self._launched(journal, handle, self._is_ours) if is_believed(journal) else []
        if handle not in known and self._is_ours(handle):
            try:
                known = self._patiently(lambda: self._attach(handle.run_id))
            except ReplicaNotFoundError:
                known = []
        if handle not in known:
            return self._siblings(handle)
        return [other for other in known if self._place(other) == self._place(handle)]

    @staticmethod
    def _launched(
        journal: RunJournal, handle: ReplicaHandle, wanted: Callable[[ReplicaHandle], bool]
    ) -> list[ReplicaHandle]:
        """Return the handles that the journal has for launches of a run's name."""
        try:
            return journal.handles(str(handle.run_id), wanted)
        except (DamagedRecordError, SpecVersionError):
            return []

    def _result_of(self, handle: ReplicaHandle) -> Any:
        believed = is_believed(self._journal)
        recorded = self._recorded(handle) if believed else None
        if recorded is None:
            try:
                return self._result(handle)
            except (ReplicaNotFoundError, ResultLostError):
                if self._journal is not None and not believed and not self._is_known(handle):
                    recorded = self._recorded(handle)
                if recorded is None:
                    raise
        status, result = recorded
        if status.message.startswith(RESULT_LOST):
            raise ResultLostError(status.message.removeprefix(RESULT_LOST))
        return result

    def _is_known(self, handle: ReplicaHandle) -> bool:
        """Return whether the backend itself has a record of a replica."""
        try:
            return handle in self._readable([handle])
        except ReplicaNotFoundError:
            return False

    def _missing(self, handle: ReplicaHandle, error: ReplicaNotFoundError | None) -> str:
        """Return the message for a replica that neither the backend nor a journal knows.

        It says what was asked for and where, and what to do.
        """
        where = shown(dict(handle.metadata)) if handle.metadata else "no metadata"
        because = "" if error is None or not str(error) else f": {error}"
        kept = self.capabilities.retention
        ended = "" if kept is None else f"ended more than {kept / 3600:g} h ago, "
        journal = (
            "a journal would remember how it ended: give one to the constructor"
            if self._journal is None
            else f"nor has the journal {self._journal!r} its end"
        )
        return (
            f"{self.backend_name} has no record of rank {handle.rank} of run {handle.run_id!r} "
            f"({where}){because}. It was purged, {ended}or was never launched where this executor "
            f"looks. list_runs() names the runs that are there; {journal}"
        )

"""Look at the replicas of a run: what its record says, and what its calls answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import compress
from typing import Any

from diloco_protocol import (
    AuthError,
    BackendError,
    ReplicaHandle,
    ReplicaNotFoundError,
    ReplicaStatus,
)
from diloco_protocol.backend import is_run_id

from .._client import _event_loop as loop
from .._client._client import Client
from .._client._errors import MissingError
from .._client._records import PREFIX
from .._request._options import DAY, ModalOptions
from .._state import _states as states
from .._state._ends import Ends
from .._state._handles import check_handle, is_of, is_of_launch, launched_at, link
from .._state._record import (
    DamagedRecordError,
    launch_of,
)
from .._state._states import End

_KEPT_BY_MODAL = 7.0 * DAY
"""Seconds for which Modal knows a call after it has ended."""


class Observer:
    """Looks at replicas, whose ends are remembered and not asked for again. Thread-safe.

    Args:
        client: Makes the calls to Modal.
        options: The options of the executor.
    """

    def __init__(self, client: Client, options: ModalOptions) -> None:
        self._client, self._options = client, options
        self._ends = Ends()

    def ended(self, handle: ReplicaHandle) -> tuple[ReplicaStatus, Any] | None:
        """Return how a replica has ended, and its result.

        None if its end was not seen yet, or is not remembered any more.
        """
        return self._ends.get(handle)

    def forget(self, handles: Sequence[ReplicaHandle]) -> None:
        """Forget the ends of replicas, since their record was removed."""
        self._ends.forget(handles)

    def observe(self, handles: Sequence[ReplicaHandle]) -> Mapping[ReplicaHandle, ReplicaStatus]:
        """Return the statuses of those replicas of one run that exist.

        Raises:
            ReplicaNotFoundError: The run has no record.
            BackendError: Modal could not be asked, or as another workspace; or the entry of the
                launch is damaged; or of none of the replicas is it known now how they are.
        """
        ends = {handle: end[0] for handle in handles if (end := self.ended(handle)) is not None}
        open_handles = [handle for handle in dict.fromkeys(handles) if handle not in ends]
        statuses: dict[ReplicaHandle, ReplicaStatus] = {}
        if open_handles:
            self.check_place(open_handles)
            record, entries = self.read_for(open_handles[0])
            known = self.known(open_handles, entries)
            grace = float(launch_of(entries)["grace"])
            looks = loop.at_once(lambda each: self._look(*each, record, grace), list(known.items()))
            seen = {
                handle: look for handle, look in zip(known, looks, strict=True) if look is not None
            }
            unknown = [look for look in seen.values() if isinstance(look, BackendError)]
            # Such an error concerns one rank, and must not hide the others.
            if unknown and len(unknown) == len(seen) and not ends:
                raise unknown[0]
            statuses = {
                handle: states.unknown(
                    look, known[handle], link(handle.metadata["function_call_id"])
                )
                if isinstance(look, BackendError)
                else look
                for handle, look in seen.items()
            }
        return {**ends, **statuses}

    def known(
        self, handles: Sequence[ReplicaHandle], entries: Mapping[str, str]
    ) -> dict[ReplicaHandle, states.Trace]:
        """Return what a record says about those handles that belong to it.

        Damage to entries of a rank concerns that rank only.

        Raises:
            DamagedRecordError: The entry of the launch is damaged.
        """
        launch, known = launch_of(entries), {}
        for handle in handles:
            try:
                if is_of(handle, launch, entries):
                    known[handle] = states.trace_of(entries, handle.rank)
            except DamagedRecordError as error:
                if is_of_launch(handle, launch):
                    known[handle] = states.trace_of(entries, handle.rank, damage=str(error))
        return known

    def read(self, run_id: str | None) -> tuple[Any, Mapping[str, str]]:
        """Return the record of a run, and its entries.

        Raises:
            ReplicaNotFoundError: There is no record.
        """
        if not (isinstance(run_id, str) and is_run_id(run_id)):
            raise ReplicaNotFoundError(f"no run can have the name {run_id!r}")
        try:
            record, entries = self._client.read(run_id)
        except MissingError as error:
            raise ReplicaNotFoundError(
                f"there is no record of the run {run_id!r} on Modal, in the environment "
                f"{self._client.environment()!r}"
            ) from error
        if "launch" not in entries:
            raise ReplicaNotFoundError(f"the record of the run {run_id!r} is empty")
        return record, entries

    def read_for(self, handle: ReplicaHandle) -> tuple[Any, Mapping[str, str]]:
        """As :meth:`read`, for the run of a handle.

        Raises:
            InvalidRequestError: The handle is of another environment.
            ReplicaNotFoundError: There is none any more.
            AuthError: There is none in the workspace that this token is of, which is not that of
                the handle.
        """
        self.check_place([handle])
        try:
            return self.read(handle.run_id)
        except ReplicaNotFoundError as error:
            self.word_without_record(handle, str(error))
            raise

    def word(self, handle: ReplicaHandle) -> str | None:
        """Return Modal's word for how a handle's call has ended; None if it has not."""

        async def look(call: str) -> str | None:
            try:
                end = await self._client.end(call, value=False)
            except MissingError:
                return "MISSING"
            return None if end is None else end.status

        return loop.at_once(look, [handle.metadata["function_call_id"]])[0]

    def word_without_record(self, handle: ReplicaHandle, why: str) -> str | None:
        """Return :meth:`word` for a handle that no record names.

        Its replica may be gone, or run in another workspace.

        Args:
            handle: Of the replica.
            why: What is not there.

        Raises:
            AuthError: The call was not started in this workspace.
        """
        word = self.word(handle)
        if word == "MISSING" and self._is_young(handle):
            raise AuthError(
                f"{why}; and Modal does not know its call {handle.metadata['function_call_id']}, "
                "as it would for 7 days: the token is of another workspace than the launch ('modal "
                "profile current', MODAL_PROFILE, MODAL_TOKEN_ID), or the handle is not true"
            )
        return word

    def check_over(self, handle: ReplicaHandle, why: str) -> None:
        """Refuse to say that nothing is left where no record tells and the call is not over.

        It is not ended here: without a record it cannot be known whether the handle is true.
        """
        call = handle.metadata["function_call_id"]
        if self.word_without_record(handle, why) is None:
            raise BackendError(
                f"{why}, but the call of this handle has not ended, and may cost money: "
                f"modal.FunctionCall.from_id({call!r}).cancel(terminate_containers=True) ends it "
                f"({link(call)})"
            )

    def unknown(
        self, handle: ReplicaHandle, trace: states.Trace | None = None
    ) -> BackendError | None:
        """Return the error for a call that a record names, but that Modal does not know.

        None if the call's end is known, or if it was started long ago.
        """
        if (trace is not None and trace.over) or not self._is_young(handle):
            return None
        call = handle.metadata["function_call_id"]
        return BackendError(
            f"Modal says that it does not know the call {call} of rank {handle.rank}, as it would "
            f"for 7 days, and the record of the run {handle.run_id!r} names it, without an end: it "
            f"may be running, and cost money ({link(call)})"
        )

    def _is_young(self, handle: ReplicaHandle) -> bool:
        return self._options.clock() - launched_at(handle) < _KEPT_BY_MODAL

    def runs(self) -> list[str]:
        """Return the names of all runs that have a record, oldest first."""
        names = self._client.record_names()
        runs = [run_id for name in names if is_run_id(run_id := name.removeprefix(PREFIX))]
        # A Dict with such a name may belong to another program, or its entries may have faded.
        return list(compress(runs, loop.at_once(self._client.is_record, runs)))

    async def _look(self, *told: Any) -> ReplicaStatus | BackendError | None:
        try:
            return await self._status(*told)
        except MissingError:  # its result has expired, or its record was removed meanwhile
            return None

    async def _status(
        self, handle: ReplicaHandle, trace: states.Trace, record: Any, grace: float
    ) -> ReplicaStatus | BackendError:
        end = await self._end(handle, trace)
        if isinstance(end, BackendError):
            return end
        url, result = link(handle.metadata["function_call_id"]), None
        if end is None:
            status = states.living(trace, url)
        elif end.status == "TERMINATED":
            trace = await asyncio.to_thread(self._terminated, handle, record, trace)
            if trace.outcome:  # it was terminated when it had ended, and was about to return
                status, result = states.reported(trace.outcome, trace, url)
            else:
                status = states.stopped(trace, url, self._options.clock(), grace)
        else:
            status, result = states.ended(end, trace, url)
        if status.state.terminal and status.finished_at is None:
            status = await asyncio.to_thread(self._dated, status, handle, record, trace)
        status = states.with_damage(status, trace)
        if status.state.terminal:
            self._ends.keep(handle, status, result, 0 if end is None else len(end.text))
        return status

    async def _end(self, handle: ReplicaHandle, trace: states.Trace) -> End | BackendError | None:
        """Return how a call has ended; also returns an error that concerns its rank alone."""
        call = handle.metadata["function_call_id"]
        try:
            return await self._client.end(call)
        except BackendError as error:
            try:
                # Raises the same error if Modal cannot be asked at all.
                end = await self._client.end(call, value=False)
            except MissingError:
                if trace.outcome or (trace.over and trace.cancel is not None):
                    return End("TERMINATED")  # the record says the rest
                if (unknown := self.unknown(handle, trace)) is not None:
                    return unknown
                raise
            if end is None or end.status != "SUCCESS":
                return end
            if error.retryable and not trace.outcome:
                return error  # a replica that failed may also have reported over 2 MiB
            return replace(end, message=str(error), late=error.retryable)

    def _terminated(self, handle: ReplicaHandle, record: Any, trace: states.Trace) -> states.Trace:
        """Complete the trace of a terminated call: when it was ended, and whether it had begun."""
        if trace.outcome:
            return trace
        if trace.cancel is None:
            trace = replace(trace, cancel=self._mark(record, handle.rank, self._options.clock()))
        key, life = f"life-{handle.rank}-{trace.lives + 1}", None
        if not trace.open and not trace.damage:
            try:
                life = self._client.get(record, key)
            except DamagedRecordError as error:
                life = {"attempt": trace.lives + 1, "at": None}
                trace = replace(trace, damage=str(error))
        if life:
            # This life has begun since the record was read. A life that begins later finds out
            # itself that its call was terminated.
            trace = replace(
                trace, open=True, lives=trace.lives + 1, attempt=life["attempt"],
                started_at=life["at"], again=None,
            )  # fmt: skip
        return trace

    def _mark(self, record: Any, rank: int, now: float) -> Mapping[str, Any]:
        """Return the entry that says when a call was terminated, and by what.

        If there is none, it is written, with the time at which the end was first noticed.
        """
        mark, key = {"by": "outside", "at": now}, f"cancel-{rank}"
        if not self._client.put_once(record, key, mark):
            with contextlib.suppress(DamagedRecordError):
                return self._client.get(record, key) or mark
        return mark

    def _dated(
        self, status: ReplicaStatus, handle: ReplicaHandle, record: Any, trace: states.Trace
    ) -> ReplicaStatus:
        """Add the time of the end to a status.

        Modal does not tell it, so the first executor that sees the end writes it into the record.
        """
        key, at = f"over-{handle.rank}", self._options.clock()
        if trace.cancel is not None and not trace.lives:
            at = float(trace.cancel["at"])  # no container could have gone on after that
        with contextlib.suppress(MissingError, DamagedRecordError):
            if not self._client.put_once(record, key, {"at": at}):
                at = (self._client.get(record, key) or {"at": at})["at"]
        return replace(status, finished_at=at)

    def check_place(self, handles: Sequence[ReplicaHandle]) -> None:
        """Refuse handles of another environment.

        Raises:
            InvalidRequestError: One of them is of another environment.
        """
        environment = self._client.environment()
        for handle in handles:
            check_handle(handle, environment)

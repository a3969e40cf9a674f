"""Looks at the replicas of a run: what its record says, and what its calls answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from diloco_protocol import (
    AuthError,
    BackendError,
    Backoff,
    ReplicaHandle,
    ReplicaNotFoundError,
    ReplicaStatus,
    retry,
)
from diloco_protocol.backend import is_run_id

from . import _many as many
from . import _states as states
from ._client import Client
from ._ends import Ends
from ._entries import CLOCKS
from ._errors import MissingError
from ._handles import check_handle, launched_at, link, make_handle
from ._options import DAY, ModalOptions
from ._record import (
    DamagedRecordError,
    Numbers,
    call_of,
    cancel_of,
    check_time,
    launch_of,
    numbers_of,
    stray,
)
from ._records import PREFIX

if TYPE_CHECKING:
    from ._wire import End

_KEPT_BY_MODAL = 7.0 * DAY
"""So long Modal knows a call after it has ended."""


class Looks:
    """What has ended is remembered, and not asked for again. Safe to share between threads.

    Args:
        client: To ask.
        options: Of the executor.
    """

    def __init__(self, client: Client, options: ModalOptions) -> None:
        self._client, self._options = client, options
        self._ends = Ends()

    def ended(self, handle: ReplicaHandle) -> tuple[ReplicaStatus, Any] | None:
        """How a replica has ended, and its result; None if that was not seen yet, or is not remembered any more."""
        return self._ends.get(handle)

    def forget(self, handles: Sequence[ReplicaHandle]) -> None:
        """Ask again: their record was removed."""
        self._ends.forget(handles)

    def at(
        self, handles: Sequence[ReplicaHandle]
    ) -> tuple[Any, Mapping[ReplicaHandle, ReplicaStatus]]:
        """Look at replicas of one run.

        Returns:
            The record of the run, or None if it was not needed; and what is known of the replicas
            that are there.

        Raises:
            ReplicaNotFoundError: The run has no record, and Modal says of each of these calls that
                it has ended.
            BackendError: Modal could not be asked, or as another workspace; or the entry of the
                launch is damaged; or the run has no record, and one of these calls lives; or of
                none of the replicas is it known now how they are.
        """
        ends = {handle: end[0] for handle in handles if (end := self.ended(handle)) is not None}
        asked = [handle for handle in dict.fromkeys(handles) if handle not in ends]
        record = None
        found: dict[ReplicaHandle, ReplicaStatus] = {}
        if asked:
            self.check_place(asked)
            record, entries = self.of(asked)
            numbers = numbers_of(entries)
            known = self.known(asked, entries, numbers)
            if any(trace.damage for trace in known.values()):
                # What is written while entries are read may be among them without what was written
                # before.
                record, entries = self.read(handles[0].run_id)
                numbers = numbers_of(entries)
                known = self.known(asked, entries, numbers)
            launch = launch_of(entries)
            grace = float(launch["grace"])
            looks = many.at_once(lambda each: self._look(*each, record, grace), list(known.items()))
            seen: dict[ReplicaHandle, ReplicaStatus | BackendError] = {
                each: look for each, look in zip(known, looks, strict=True) if look is not None
            }
            whys = {each: unnamed(each, entries) for each in asked if each not in known}
            for each, error in self._living(whys).items():
                seen[each], trace = error, states.Trace()
                if is_of_launch(each, launch):  # only the entry of its call is gone
                    trace = states.trace_of(entries, each.rank, numbers, damage=str(error))
                known[each] = trace
            unknown = [look for look in seen.values() if isinstance(look, BackendError)]
            # It is one rank's, and hides no other.
            if unknown and len(unknown) == len(seen) and not ends:
                raise unknown[0]
            found = {
                handle: states.unknown(
                    look, known[handle], link(handle.metadata["function_call_id"])
                )
                if isinstance(look, BackendError)
                else look
                for handle, look in seen.items()
            }
        return record, {**ends, **found}

    def known(
        self, handles: Sequence[ReplicaHandle], entries: Mapping[str, str], numbers: Numbers
    ) -> dict[ReplicaHandle, states.Trace]:
        """What a record says of those of the handles that are its; damage concerns a rank of its own.

        Raises:
            DamagedRecordError: Of the entry of the launch.
        """
        launch, now = launch_of(entries), self._options.clock()
        known = {}
        for handle in handles:
            rank, latest = handle.rank, (launch["at"] - CLOCKS, now + CLOCKS)
            try:
                if not is_of(handle, launch, entries):
                    continue
                trace = states.trace_of(entries, rank, numbers)
                if trace.cancel is not None:
                    check_time(cancel_of(rank, numbers), trace.cancel, *latest)
            except DamagedRecordError as error:
                if not is_of_launch(handle, launch):
                    continue
                trace = states.trace_of(entries, rank, numbers, damage=str(error))
                if trace.cancel is not None and not latest[0] <= trace.cancel["at"] <= latest[1]:
                    trace = replace(trace, cancel=None)
            known[handle] = trace
        return known

    def read(self, run_id: str | None) -> tuple[Any, Mapping[str, str]]:
        """The record of a run, and its entries.

        Raises:
            ReplicaNotFoundError: There is none.
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

    def of(self, handles: Sequence[ReplicaHandle]) -> tuple[Any, Mapping[str, str]]:
        """As :meth:`read`, for the run of some handles.

        Raises:
            ReplicaNotFoundError: There is none any more, and their calls have ended.
            AuthError: There is none in the workspace that this token is of, which is not that of a
                handle.
            BackendError: There is none, and a call has not ended.
        """
        try:
            return self.read(handles[0].run_id)
        except ReplicaNotFoundError as error:
            for living in self._living(dict.fromkeys(handles, str(error))).values():
                raise living from error
            raise

    def word(self, handle: ReplicaHandle) -> str | None:
        """Modal's word for how a handle's call has ended, without what it returned; None if it has not."""
        return many.at_once(self._word, [handle])[0]

    async def _word(self, handle: ReplicaHandle) -> str | None:
        try:
            end = await self._client.end(handle.metadata["function_call_id"], value=False)
        except MissingError:
            return "MISSING"
        return None if end is None else end.status

    def check_over(self, handle: ReplicaHandle, why: str) -> None:
        """Refuse to say that nothing is left, if the record is gone or damaged and the call is not over.

        It is not ended here: without a record nobody knows whether the handle is true.
        """
        for living in self._living({handle: why}).values():
            raise living

    def _living(self, handles: Mapping[ReplicaHandle, str]) -> dict[ReplicaHandle, BackendError]:
        """The errors for handles that no record names, and whose calls Modal does not say to have ended.

        Args:
            handles: What is to be said of each: what is not there.
        """
        living: dict[ReplicaHandle, BackendError] = {}
        words = many.at_once(self._word, list(handles))
        for (handle, why), word in zip(handles.items(), words, strict=True):
            call = handle.metadata["function_call_id"]
            if word is None:
                living[handle] = BackendError(
                    f"{why}, but the call of this handle has not ended, and may cost money: "
                    f"modal.FunctionCall.from_id({call!r}).cancel(terminate_containers=True) ends "
                    f"it ({link(call)})"
                )
            elif word == "MISSING" and self._is_young(handle):
                living[handle] = AuthError(
                    f"{why}; and Modal does not know its call {call}, as it would for 7 days: the "
                    "token is of another workspace than the launch ('modal profile current', "
                    "MODAL_PROFILE, MODAL_TOKEN_ID), or the handle is not true"
                )
        return living

    def unknown(
        self, handle: ReplicaHandle, trace: states.Trace | None = None
    ) -> BackendError | None:
        """The error for a call that a record names and Modal says not to know; None if its end is known, or it was long ago."""
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

    def runs(self, backoff: Backoff) -> list[str]:
        """Names of all runs that have a record, oldest first.

        Args:
            backoff: Pauses between tries.
        """
        patience = backoff, self._options.retry_timeout
        names = retry(self._client.record_names, backoff, timeout=self._options.retry_timeout)
        runs = [run_id for name in names if is_run_id(run_id := name.removeprefix(PREFIX))]
        # A Dict of that name may be somebody else's, or its entries have faded.
        ours = many.at_once(
            lambda run_id: many.patiently(lambda: self._client.is_record(run_id), *patience), runs
        )
        return [run_id for run_id, is_run in zip(runs, ours, strict=True) if is_run]

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
        """How a call has ended; an error that concerns its rank alone is returned."""
        from ._wire import End

        call = handle.metadata["function_call_id"]
        try:
            return await self._client.end(call)
        except BackendError as error:
            try:
                # Raises the same if it is Modal that cannot be asked.
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
                return error  # a replica that failed may have reported more than 2 MiB, too
            return replace(end, message=str(error), late=error.retryable)

    def _terminated(self, handle: ReplicaHandle, record: Any, trace: states.Trace) -> states.Trace:
        """What is to be known of a call that was terminated: since when, and whether it had begun."""
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
            # It has begun since the record was read. One that begins later finds that its call was
            # terminated.
            trace = replace(
                trace, open=True, lives=trace.lives + 1, attempt=life["attempt"], started_at=life["at"], again=None,
            )  # fmt: skip
        return trace

    def _mark(self, record: Any, rank: int, now: float) -> Mapping[str, Any]:
        """The entry that says since when a call is known to be terminated, and by whom; written if there is none."""
        mark, key = {"by": "outside", "at": now}, f"cancel-{rank}"
        while key and not self._client.put_once(record, key, mark):
            with contextlib.suppress(DamagedRecordError):
                return self._client.get(record, key) or mark
            key = self._client.next_cancel(record, rank, key)
        return mark

    def _dated(
        self, status: ReplicaStatus, handle: ReplicaHandle, record: Any, trace: states.Trace
    ) -> ReplicaStatus:
        """With the time of its end: Modal does not tell it, so whoever sees it first writes it down for all."""
        key, at = f"over-{handle.rank}", self._options.clock()
        if trace.cancel is not None and not trace.lives:
            at = float(trace.cancel["at"])  # it never had a container that could have gone on
        with contextlib.suppress(MissingError, DamagedRecordError):
            if not self._client.put_once(record, key, {"at": at}):
                at = (self._client.get(record, key) or {"at": at})["at"]
        return replace(status, finished_at=at)

    def check_place(self, handles: Sequence[ReplicaHandle]) -> None:
        """Refuse handles of another environment.

        Raises:
            InvalidRequestError: One is.
        """
        environment = self._client.environment()
        for handle in handles:
            check_handle(handle, environment)


def is_of(handle: ReplicaHandle, launch: Mapping[str, Any], entries: Mapping[str, str]) -> bool:
    """Whether a record is the handle's, and not of a later launch of the same name.

    Raises:
        DamagedRecordError: The entry of its call is damaged, or the launch leaves its rank out.
    """
    call = call_of(entries, handle.rank)
    if not call:
        return False
    if handle.rank not in launch["ranks"]:
        raise stray(entries, handle.rank)
    return call == handle.metadata["function_call_id"] and is_of_launch(handle, launch)


def unnamed(handle: ReplicaHandle, entries: Mapping[str, str]) -> str:
    """What is to be said of a handle that is not the record's."""
    with contextlib.suppress(DamagedRecordError):
        if call_of(entries, handle.rank) == handle.metadata["function_call_id"]:
            return other_launch(handle)
    return other_call(handle)


def other_call(handle: ReplicaHandle) -> str:
    """What is to be said of a handle that a record does not name."""
    return f"the record of the run {handle.run_id!r} on Modal names another call of rank {handle.rank}, or none"


def other_launch(handle: ReplicaHandle) -> str:
    """What is to be said of a handle whose call a record names, of another launch."""
    return (
        f"the record of the run {handle.run_id!r} on Modal names the call of this handle, but says "
        "otherwise of its launch (app, function, time, number of replicas; "
        f"attach({handle.run_id!r}) gives the true handles)"
    )


def is_of_launch(handle: ReplicaHandle, launch: Mapping[str, Any]) -> bool:
    """Whether a handle says of its launch what the record says, whatever its call is."""
    call = handle.metadata["function_call_id"]
    true = make_handle(launch, handle.rank, call, handle.run_id)
    return handle.world_size == true.world_size and all(
        handle.metadata[key] == value for key, value in true.metadata.items()
    )

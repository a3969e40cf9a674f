"""Looks at the replicas of a run: what its record says, and what its calls answer."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from diloco_protocol import (
    BackendError,
    ReplicaHandle,
    ReplicaNotFoundError,
    ReplicaStatus,
    UnavailableError,
)
from diloco_protocol.backend import is_run_id

from . import _many as many
from . import _states as states
from ._client import Client
from ._entries import CLOCKS
from ._errors import MissingError
from ._handles import check_handle, link, make_handle
from ._options import ModalOptions
from ._record import (
    DamagedRecordError,
    Numbers,
    call_of,
    cancel_of,
    check_time,
    checked,
    launch_of,
    numbers_of,
    stray,
)


class Looks:
    """What has ended is remembered, and not asked for again. Safe to share between threads.

    Args:
        client: To ask.
        options: Of the executor.
    """

    def __init__(self, client: Client, options: ModalOptions) -> None:
        self._client, self._options = client, options
        self._ended: dict[ReplicaHandle, tuple[ReplicaStatus, Any]] = {}
        self._lock = threading.Lock()

    def ended(self, handle: ReplicaHandle) -> tuple[ReplicaStatus, Any] | None:
        """How a replica has ended, and its result; None if that was not seen yet."""
        return self._ended.get(handle)

    def forget(self, handles: Sequence[ReplicaHandle]) -> None:
        """Ask again: their record was removed."""
        with self._lock:
            for handle in handles:
                self._ended.pop(handle, None)

    def at(
        self, handles: Sequence[ReplicaHandle]
    ) -> tuple[Any, Mapping[ReplicaHandle, ReplicaStatus]]:
        """Look at replicas of one run.

        Returns:
            The record of the run, or None if it was not needed; and what is known of the replicas that are there.

        Raises:
            ReplicaNotFoundError: The run has no record.
            BackendError: Modal could not be asked, or the record is damaged.
        """
        asked = [handle for handle in dict.fromkeys(handles) if handle not in self._ended]
        record, found = None, {}
        if asked:
            self.check_place(asked)
            record, entries = self.read(handles[0].run_id)
            try:
                known = self.known(asked, entries, numbers_of(entries))
            except DamagedRecordError:
                # What is written while entries are read may be among them without what was written before.
                record, entries = self.read(handles[0].run_id)
                known = self.known(asked, entries, numbers_of(entries))
            grace = float(launch_of(entries)["grace"])
            looks = many.at_once(lambda each: self._look(*each, record, grace), list(known.items()))
            found = dict(zip(known, looks, strict=True))
        told = {}
        for handle in handles:
            if handle in self._ended:
                told[handle] = self._ended[handle][0]
            elif (status := found.get(handle)) is not None:
                told[handle] = status
        return record, told

    def known(
        self, handles: Sequence[ReplicaHandle], entries: Mapping[str, Any], numbers: Numbers
    ) -> dict[ReplicaHandle, states.Trace]:
        """What a record says of those of the handles that are its.

        Raises:
            DamagedRecordError: It says what cannot be.
        """
        launch, now = launch_of(entries), self._options.clock()
        known = {}
        for handle in handles:
            if is_of(handle, launch, entries):
                trace = states.trace_of(entries, handle.rank, numbers)
                if trace.cancel is not None:
                    key = cancel_of(handle.rank, numbers)
                    check_time(key, trace.cancel, launch["at"] - CLOCKS, now + CLOCKS)
                known[handle] = trace
        return known

    def read(self, run_id: str | None) -> tuple[Any, Mapping[str, Any]]:
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
                f"there is no record of the run {run_id!r} on Modal"
            ) from error
        if "launch" not in entries:
            raise ReplicaNotFoundError(f"the record of the run {run_id!r} is empty")
        return record, entries

    async def _look(self, *told: Any) -> ReplicaStatus | None:
        try:
            return await self._status(*told)
        except MissingError:  # its result has expired, or its record was removed meanwhile
            return None

    async def _status(
        self, handle: ReplicaHandle, trace: states.Trace, record: Any, grace: float
    ) -> ReplicaStatus:
        call = handle.metadata["function_call_id"]
        url = link(call)
        try:
            status, result = states.reported(await self._client.answer(call), trace, url)
        except TimeoutError as error:  # the builtin one: it has not ended
            # Modal's own says nothing. An app that is not ours may raise one, too, and would wait for ever.
            if not error.args or await asyncio.to_thread(self._client.status, call) == "PENDING":
                return states.living(trace, url)
            ended_by = asyncio.to_thread(self._ended_by, error, handle, record, trace, grace)
            status, result = await ended_by
        except BackendError:
            raise
        except BaseException as error:  # noqa: BLE001 - what its container has raised, such as SystemExit
            ended_by = asyncio.to_thread(self._ended_by, error, handle, record, trace, grace)
            status, result = await ended_by
        if status.state.terminal and status.finished_at is None:
            status = await asyncio.to_thread(self._dated, status, handle, record, trace)
        if status.state.terminal:
            with self._lock:
                self._ended[handle] = (status, result)
        return status

    def _ended_by(
        self,
        error: BaseException,
        handle: ReplicaHandle,
        record: Any,
        trace: states.Trace,
        grace: float,
    ) -> tuple[ReplicaStatus, Any]:
        call = handle.metadata["function_call_id"]
        word = self._client.status(call)
        if not states.is_end(error, word):
            raise UnavailableError(
                f"what the call {call} has returned could not be fetched, and Modal's word for it is {word}: "
                f"{type(error).__name__}: {error}"
            ) from error
        if word != "TERMINATED":
            return states.died(error, trace, link(call)), None
        if trace.outcome:  # it was terminated when it had ended, and was about to return
            return states.reported(trace.outcome, trace, link(call))
        now = self._options.clock()
        if trace.cancel is None:
            mark = {"by": "outside", "at": now}
            key = f"cancel-{handle.rank}"
            if not self._client.put_once(record, key, mark):
                mark = self._client.get(record, key) or mark
            trace = replace(trace, cancel=checked(key, mark))
        key = f"life-{handle.rank}-{trace.lives + 1}"
        if not trace.open and (life := self._client.get(record, key)) is not None:
            # It has begun since the record was read. One that begins later finds that its call was terminated.
            started = checked(key, life)
            trace = replace(
                trace, open=True, lives=trace.lives + 1, attempt=started["attempt"], started_at=started["at"], again=None,
            )  # fmt: skip
        return states.stopped(trace, link(call), now, grace), None

    def _dated(
        self, status: ReplicaStatus, handle: ReplicaHandle, record: Any, trace: states.Trace
    ) -> ReplicaStatus:
        """With the time of its end: Modal does not tell it, so whoever sees it first writes it down for all."""
        key, at = f"over-{handle.rank}", self._options.clock()
        if trace.cancel is not None and not trace.lives:
            at = float(trace.cancel["at"])  # it never had a container that could have gone on
        with contextlib.suppress(MissingError):
            if not self._client.put_once(record, key, {"at": at}):
                at = checked(key, self._client.get(record, key) or {"at": at})["at"]
        return replace(status, finished_at=at)

    def check_place(self, handles: Sequence[ReplicaHandle]) -> None:
        """Refuse handles of another environment.

        Raises:
            InvalidRequestError: One is.
        """
        environment = self._client.environment()
        for handle in handles:
            check_handle(handle, environment)


def is_of(handle: ReplicaHandle, launch: Mapping[str, Any], entries: Mapping[str, Any]) -> bool:
    """Whether a record is the handle's, and not of a later launch of the same name."""
    call = call_of(entries, handle.rank)
    if not call:
        return False
    if handle.rank not in launch["ranks"]:
        raise stray(entries, handle.rank)
    true = make_handle(launch, handle.rank, call, handle.run_id)
    return handle.world_size == true.world_size and all(
        handle.metadata[key] == value for key, value in true.metadata.items()
    )

"""Ending the replicas of a run, whatever is left of its record."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from diloco_protocol import BackendError, ReplicaHandle, ReplicaNotFoundError

from . import _many as many
from . import _states as states
from ._client import Client
from ._ending import Ending
from ._errors import MissingError
from ._handles import link
from ._looks import Looks
from ._options import ModalOptions
from ._record import DamagedRecordError, Numbers, calls_of, held_calls


class Cancels:
    """Ends what is alive, and nothing else. Safe to share between threads.

    Args:
        client: To ask.
        options: Of the executor.
        looks: Knows what has ended.
        patiently: Tries a call again for a while as long as Modal throttles or fails.
    """

    def __init__(
        self,
        client: Client,
        options: ModalOptions,
        looks: Looks,
        patiently: Callable[[Callable[[], Any]], Any],
    ) -> None:
        self._client, self._options, self._looks = client, options, looks
        self._patiently = patiently

    def cancel(self, handle: ReplicaHandle) -> None:
        """End a replica; if it has ended, nothing is done.

        Raises:
            BackendError: Modal could not be asked, or refused; or nobody knows whether it is over.
        """
        ending = self._ending(handle.rank, handle.metadata["function_call_id"])
        self._patiently(lambda: self._cancel(handle, ending))

    def end_if_alive(
        self, handle: ReplicaHandle, record: Any, entries: Mapping[str, Any], numbers: Numbers
    ) -> bool:
        """End a replica of which the record says that it is alive. Returns whether it says so.

        It has written no end, so it is not looked at before: Modal keeps the result of what has ended.
        """
        try:
            trace = self._looks.known([handle], entries, numbers).get(handle)
        except DamagedRecordError:
            return False
        if trace is None or trace.ended_at is not None:
            return False
        if self._looks.ended(handle) is None:
            ending = self._ending(handle.rank, handle.metadata["function_call_id"])
            self._patiently(lambda: self._end(handle, record, ending))
        return True

    def close(self, run_id: str) -> bool:
        """Have no call claim a rank any more; whether the record was removed, since no call ever held one."""
        record, entries = self._patiently(lambda: self._looks.read(run_id))
        if self.void(record, entries):
            _, entries = self._patiently(lambda: self._looks.read(run_id))
        if any(held != "" for held in calls_of(entries).values()):
            return False
        self._patiently(lambda: self._client.delete_record(run_id, record))
        return True

    def end_known(self, run_id: str, damage: DamagedRecordError) -> None:
        """End the calls that a damaged record knows.

        Raises:
            DamagedRecordError: Says what it was, and what may be left.
        """
        record, entries = self._patiently(lambda: self._looks.read(run_id))
        left = []
        for rank, call in held_calls(entries):
            try:
                ending = self._ending(rank, call)
                self._patiently(lambda ending=ending: ending.attempt(record))  # type: ignore[misc]
            except BackendError:
                left.append(call)
        text = f"{damage}. The calls that its record knows were told to end"
        if left:
            text += f", but for these, which may cost money: {', '.join(left)}"
        raise DamagedRecordError(text) from damage

    def void(self, record: Any, entries: Mapping[str, Any]) -> bool:
        """Have no call claim a rank that none holds; whether there was such a rank."""
        unclaimed = [rank for rank, held in calls_of(entries).items() if held is None]

        def claim() -> None:
            for rank in unclaimed:
                self._client.put_once(record, f"call-{rank}", {"call": ""})

        if unclaimed:
            self._patiently(claim)
        return bool(unclaimed)

    def _cancel(self, handle: ReplicaHandle, ending: Ending) -> None:
        try:
            record, told = self._looks.at([handle])
        except ReplicaNotFoundError:
            gone = f"the record of the run {handle.run_id!r} was removed from Modal"
            self._check_over(handle, gone)
            return
        except DamagedRecordError as damage:
            # It may be running, and its call is known nevertheless.
            record, entries = self._looks.read(handle.run_id)
            if (handle.rank, handle.metadata["function_call_id"]) in held_calls(entries):
                self._end(handle, record, ending)
            else:
                self._check_over(handle, str(damage))
            return
        if handle in told:
            if not told[handle].state.terminal:
                self._end(handle, record, ending)
            return
        _, entries = self._looks.read(handle.run_id)
        if (handle.rank, handle.metadata["function_call_id"]) not in held_calls(entries):
            other = f"the record of the run {handle.run_id!r} on Modal names another call of rank {handle.rank}, or none"
            self._check_over(handle, other)

    def _check_over(self, handle: ReplicaHandle, why: str) -> None:
        """Refuse to say that nothing is left to end, if the record is gone or damaged and the call is not over.

        It is not ended here: without a record nobody knows whether the handle is true.
        """
        call = handle.metadata["function_call_id"]

        async def lives(call: str) -> bool:
            try:
                await self._client.answer(call)
            except TimeoutError:
                return True
            except MissingError:
                return False
            except BackendError:
                raise
            except BaseException as error:  # noqa: BLE001 - what its container has raised, or asking for it
                word = await asyncio.to_thread(self._client.status, call)
                return word == "PENDING" and not states.is_end(error, word)
            return False

        if many.at_once(lives, [call]) == [True]:
            raise BackendError(
                f"{why}, but the call of this handle has not ended, and may "
                f"cost money: modal.FunctionCall.from_id({call!r}).cancel(terminate_containers=True) ends it ({link(call)})"
            )

    def _ending(self, rank: int, call: str) -> Ending:
        return Ending(self._client, self._options.clock, rank, call)

    def _end(self, handle: ReplicaHandle, record: Any, ending: Ending) -> None:
        try:
            ending.attempt(record)
        except BackendError as error:
            # It is not documented what Modal says about a call that has ended just then.
            if error.retryable or not self._has_ended(handle):
                raise

    def _has_ended(self, handle: ReplicaHandle) -> bool:
        with contextlib.suppress(BackendError):
            status = self._looks.at([handle])[1].get(handle)
            return status is not None and status.state.terminal
        return False

"""End the replicas of a run, whatever is left of its record."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from diloco_protocol import (
    BackendError,
    ReplicaHandle,
    ReplicaNotFoundError,
)
from diloco_protocol.backend import cancel_all

from .._client import _event_loop as loop
from .._client._client import Client
from .._request._options import ModalOptions
from .._state._handles import not_its_own
from .._state._record import DamagedRecordError, call_of, calls_of, held_calls
from ._end_call import Ending
from ._observe import Observer


class Canceller:
    """Ends the calls that have not ended, and no others. Safe to share between threads.

    Args:
        client: Makes the calls to Modal.
        options: The options of the executor.
        observer: Knows which replicas have ended.
        patiently: Makes a call, and repeats it for a while if Modal throttles or fails.
    """

    def __init__(
        self,
        client: Client,
        options: ModalOptions,
        observer: Observer,
        patiently: Callable[[Callable[[], Any]], Any],
    ) -> None:
        self._client, self._options, self._observer = client, options, observer
        self._patiently = patiently

    def cancel(self, handle: ReplicaHandle) -> None:
        """End a replica; does nothing if it has ended.

        Raises:
            BackendError: Modal could not be asked, or refused; or it is unknown whether the replica
                has ended.
        """
        ending = self._ending(handle.rank, handle.metadata["function_call_id"])
        self._patiently(lambda: self._cancel(handle, ending))

    def cancel_run(
        self,
        run_id: str,
        attach: Callable[[str], list[ReplicaHandle]],
        cancel: Callable[[ReplicaHandle], None],
    ) -> None:
        """End all replicas of a run, as the executor's verb of this name promises.

        Args:
            run_id: Name of the run.
            attach: Finds its handles, also in a journal.
            cancel: Ends one replica.
        """
        freed = False
        try:
            with contextlib.suppress(ReplicaNotFoundError):
                freed = self.close(run_id)
            handles = attach(run_id)
        except ReplicaNotFoundError:
            if freed:
                return
            raise
        except DamagedRecordError as damage:
            self.end_known(run_id, damage)
            return
        try:
            record, entries = self._patiently(lambda: self._observer.read(run_id))
        except ReplicaNotFoundError:  # only the journal knows it
            cancel_all(handles, cancel)
            return
        known = self._observer.known(handles, entries)

        def stop(handle: ReplicaHandle) -> None:
            trace = known.get(handle)
            # One that is alive by the record has written no end, so its call is not looked at
            # first: if it has ended nevertheless, Modal keeps its result.
            alive = trace is not None and not trace.damage and trace.ended_at is None
            if not alive or self._observer.ended(handle) is not None:
                cancel(handle)
                return
            ending = self._ending(handle.rank, handle.metadata["function_call_id"])
            self._patiently(lambda: self._end(handle, record, ending))

        cancel_all(handles, stop)

    def close(self, run_id: str) -> bool:
        """Prevent calls from claiming a rank, and remove the record if no call has ever held one.

        Returns:
            Whether the record was removed.
        """
        record, entries = self._patiently(lambda: self._observer.read(run_id))
        if self.void(record, entries):
            _, entries = self._patiently(lambda: self._observer.read(run_id))
        if any(call != "" for call in calls_of(entries).values()):
            return False
        self._patiently(lambda: self._client.delete_record(run_id, record))
        return True

    def end_known(self, run_id: str, damage: DamagedRecordError) -> None:
        """End the calls that a damaged record names.

        Raises:
            DamagedRecordError: Always; says what the damage is, and which calls may be left.
        """
        record, entries = self._patiently(lambda: self._observer.read(run_id))
        left = []

        def end(rank: int, call: str) -> None:
            ending = self._ending(rank, call)
            self._patiently(lambda: self._check_app(call))
            self._patiently(lambda: ending.attempt(record))

        for rank, call in held_calls(entries):
            try:
                end(rank, call)
            except BackendError:
                left.append(call)
        text = f"{damage}. The calls that its record knows were told to end"
        if left:
            text += f", but for these, which may cost money: {', '.join(left)}"
        raise DamagedRecordError(text) from damage

    def void(self, record: Any, entries: Mapping[str, str]) -> bool:
        """Prevent calls from claiming ranks that none holds; return whether there were any."""
        unclaimed = [rank for rank, call in calls_of(entries).items() if call is None]

        async def claim(rank: int) -> None:
            with contextlib.suppress(DamagedRecordError):  # reported when the record is read again
                await self._client.hold(record, f"call-{rank}", {"call": ""})

        self._patiently(lambda: loop.at_once(claim, unclaimed))
        return bool(unclaimed)

    def _cancel(self, handle: ReplicaHandle, ending: Ending) -> None:
        if self._observer.ended(handle) is not None:
            return
        self._observer.check_place([handle])
        call, record = handle.metadata["function_call_id"], None
        why = not_its_own(handle)
        in_launch, trace = False, None
        try:
            record, entries = self._observer.read(handle.run_id)
            trace = self._observer.known([handle], entries).get(handle)
            in_launch = call_of(entries, handle.rank) == call and trace is not None
            if trace is not None and trace.damage:
                why = trace.damage
        except ReplicaNotFoundError as error:
            why = str(error)
        except DamagedRecordError as damage:  # it may be running nevertheless
            why = str(damage)
        if not in_launch:
            self._observer.check_over(handle, why)
            return
        word = self._observer.word(handle)
        unknown = word == "MISSING" and self._observer.unknown(handle, trace) is not None
        # A call that an earlier try has terminated still needs its mark if the answer was lost.
        if word is None or unknown or (word == "TERMINATED" and ending.tried):
            self._end(handle, record, ending)

    def _check_app(self, call: str) -> None:
        """Refuse a call that does not belong to the executor's own app, whatever a record says."""
        app, function = self._options.app, self._options.function
        loop.at_once(lambda each: self._client.check_app(each, app, function), [call])

    def _ending(self, rank: int, call: str) -> Ending:
        return Ending(self._client, self._options.clock, rank, call)

    def _end(self, handle: ReplicaHandle, record: Any, ending: Ending) -> None:
        call = handle.metadata["function_call_id"]
        self._check_app(call)
        try:
            ending.attempt(record)
        except BackendError as error:
            # It is not documented how Modal answers if the call has just ended.
            if error.retryable or (word := self._observer.word(handle)) is None:
                raise
            if word == "MISSING" and (unknown := self._observer.unknown(handle)) is not None:
                raise unknown from error

"""End the calls of a launch that failed or was interrupted."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

from diloco_protocol import BackendError, Backoff, ReplicaHandle, RunRequest, retry

from .._client import _event_loop as loop
from .._client._client import Client
from .._request._options import ModalOptions
from .._state._handles import make_handle
from ._end_call import Ending


class Withdrawal:
    """The withdrawal of a launch.

    Which calls may live on is known at any time, even after a second Ctrl-C.

    Args:
        client: Makes the calls to Modal.
        options: The options of the executor.
        backoff: Pauses between tries.
        request: The launch.
        launch: Its entry in the record.
        record: The record of the run.
        made: Calls that this launch has started, by rank.

    Attributes:
        left: Those of them that have not been ended.
        others: Calls that hold a rank and were started by another launcher, or by this one with an
            answer that was lost.
        kept: Whether another launch of the run may have returned the calls that this one has
            started. If so, none of them is ended.
    """

    def __init__(
        self,
        client: Client,
        options: ModalOptions,
        backoff: Backoff,
        request: RunRequest,
        launch: Mapping[str, Any],
        record: Any,
        made: Mapping[int, str],
    ) -> None:
        self._client, self._options, self._backoff = client, options, backoff
        self._request, self._launch, self._record = request, launch, record
        self.left = dict(made)
        self.others: dict[int, str] = {}
        self.kept = False
        self._unsure = False
        self._deadline = backoff.clock() + options.retry_timeout
        self._down = False

    def run(self, *, mine: bool) -> None:
        """End the calls.

        Args:
            mine: Whether this launch has made the record. If so, no call may claim a rank any more,
                and the record is removed if no call is left.
        """
        if self.left:
            settle = lambda: self._client.settle(self._record, kept=False)  # noqa: E731
            with contextlib.suppress(BackendError):  # after an error they are ended all the same
                self.kept = retry(settle, self._backoff, timeout=self._patience())
        if self.kept:
            loop.at_once(self._void, list(self._request.ranks))  # shows which calls hold them
            self.left = {}
            return
        if mine:
            # The first step, so that a call whose answer was lost trains nothing.
            loop.at_once(
                self._void, [rank for rank in self._request.ranks if rank not in self.left]
            )
        loop.at_once(self._end, sorted(self.left.items()))
        if mine and not (self.left or self.others or self._unsure):
            # Without the record, a call that is left over trains nothing. The name is free again.
            with contextlib.suppress(BackendError):
                self._client.delete_record(self._request.run_id, self._record)

    def survivors(self) -> list[ReplicaHandle]:
        """Return the handles of the calls that may live on, in rank order."""
        calls = sorted((self.left | self.others).items())
        return [make_handle(self._launch, rank, call, self._request.run_id) for rank, call in calls]

    def note(self) -> str:
        """Describe the calls that may live on; empty if there are none."""
        calls = [*self.left.values(), *self.others.values()]
        if self.kept:
            return (
                "another launch of this run may have returned these calls, so they go on: "
                f"{', '.join(calls)}"
            )
        return f"these calls may be running, and cost money: {', '.join(calls)}" if calls else ""

    async def _void(self, rank: int) -> None:
        entry = f"call-{rank}", {"call": ""}
        try:
            holder = await loop.patiently(
                lambda: self._client.hold(self._record, *entry), self._backoff, self._patience()
            )
        except BackendError:  # if the record is gone, no call can claim the rank either
            self._unsure = True
            return
        if holder["call"]:
            self.others[rank] = holder["call"]

    async def _end(self, made: tuple[int, str]) -> None:
        await asyncio.to_thread(self._end_one, *made)

    def _end_one(self, rank: int, call: str) -> None:
        if self._down:  # the tries to end another call have used up the time
            return
        ending = Ending(self._client, self._options.clock, rank, call)
        try:
            retry(
                lambda: ending.attempt(self._record, unmarked=True),
                self._backoff,
                timeout=self._patience(),
            )
        except BackendError as error:
            self._down = error.retryable
            return
        self._down = False
        del self.left[rank]

    def _patience(self) -> float:
        """Return the seconds that are left for all calls together."""
        return max(0.0, self._deadline - self._backoff.clock())

"""End the calls of a launch that failed or was interrupted."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

from diloco_protocol import BackendError, Backoff, RunRequest, retry

from .._client import _event_loop as loop
from .._client._client import Client
from .._request._options import ModalOptions
from ._end_call import Ending


class Withdrawal:
    """The withdrawal of a launch.

    Which calls may live on is known at any time, even after a second Ctrl-C.

    Args:
        client: Makes the calls to Modal.
        options: The options of the executor.
        backoff: Pauses between tries.
        record: The record of the run.
        made: Calls that this launch has started, by rank.
        others: Calls that hold a rank and were started by another launcher, or by this one with an
            answer that was lost.

    Attributes:
        left: Those that this launch has started and that have not been ended.
        others: The others, as far as they are known by now.
    """

    def __init__(
        self,
        client: Client,
        options: ModalOptions,
        backoff: Backoff,
        record: Any,
        made: Mapping[int, str],
        others: dict[int, str],
    ) -> None:
        self._client, self._options, self._backoff = client, options, backoff
        self._record = record
        self.left, self.others = dict(made), others
        self._unsure = self._down = False
        self._deadline = backoff.clock() + options.retry_timeout

    def run(self, request: RunRequest, *, mine: bool) -> None:
        """End the calls.

        Args:
            request: The launch.
            mine: Whether this launch has made the record. If so, no call may claim a rank any more,
                and the record is removed if no call is left.
        """
        if mine:
            # The first step, so that a call whose answer was lost trains nothing.
            loop.at_once(self._void, [rank for rank in request.ranks if rank not in self.left])
        loop.at_once(self._end, sorted(self.left.items()))
        if mine and not (self.left or self.others or self._unsure):
            # Without the record, a call that is left over trains nothing. The name is free again.
            with contextlib.suppress(BackendError):
                self._client.delete_record(request.run_id, self._record)

    def calls(self) -> dict[int, str]:
        """Return the calls that may live on, in rank order."""
        return dict(sorted((self.left | self.others).items()))

    def note(self) -> str:
        """Describe the calls that may live on; empty if there are none."""
        if not (calls := self.calls()):
            return ""
        return (
            f"{len(calls)} calls of this launch may be running, and cost money until they are "
            f"cancelled: its survivors ({', '.join(calls.values())})"
        )

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

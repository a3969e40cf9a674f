"""Ending what a launch has started that failed or was interrupted."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

from diloco_protocol import BackendError, Backoff, ReplicaHandle, RunRequest, retry

from . import _many as many
from ._client import Client
from ._ending import Ending
from ._handles import make_handle
from ._options import ModalOptions


class Withdrawal:
    """Takes a launch back. What may live on is known at any time, also after a second Ctrl-C.

    Args:
        client: To ask.
        options: Of the executor.
        backoff: Pauses between tries.
        request: The launch.
        launch: Its entry in the record.
        record: Of the run.
        made: Calls that this launch has started, by rank.

    Attributes:
        left: Those of them that have not been ended.
        others: Calls that hold a rank and are not of this launcher, or their answer was lost.
        kept: Whether another launch of the run may have returned what this one has started: none of
            it is ended then.
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
        """End them.

        Args:
            mine: Whether it was this launch that made the record. Then nobody may claim a rank any
                more, and the record is removed if nothing is left.
        """
        if self.left:
            settle = lambda: self._client.settle(self._record, kept=False)  # noqa: E731
            with contextlib.suppress(BackendError):  # then they are ended all the same
                self.kept = retry(settle, self._backoff, timeout=self._patience())
        if self.kept:
            many.at_once(self._void, list(self._request.ranks))  # all are held: tells by which
            self.left = {}
            return
        if mine:
            # First of all: a call whose answer was lost trains nothing then.
            many.at_once(
                self._void, [rank for rank in self._request.ranks if rank not in self.left]
            )
        many.at_once(self._end, sorted(self.left.items()))
        if mine and not (self.left or self.others or self._unsure):
            # Without the record a call that was left over trains nothing, and the name is free
            # again.
            with contextlib.suppress(BackendError):
                self._client.delete_record(self._request.run_id, self._record)

    def survivors(self) -> list[ReplicaHandle]:
        """The handles of what may live on, in rank order."""
        calls = sorted((self.left | self.others).items())
        return [make_handle(self._launch, rank, call, self._request.run_id) for rank, call in calls]

    def note(self) -> str:
        """What may live on, in words; empty if nothing does."""
        calls = [*self.left.values(), *self.others.values()]
        if self.kept:
            return f"another launch of this run may have returned these calls, so they go on: {', '.join(calls)}"
        return f"these calls may be running, and cost money: {', '.join(calls)}" if calls else ""

    async def _void(self, rank: int) -> None:
        entry = f"call-{rank}", {"call": ""}
        try:
            held = await many.patiently(
                lambda: self._client.hold(self._record, *entry), self._backoff, self._patience()
            )
        except BackendError:  # without its record, which may be gone, nobody can claim it either
            self._unsure = True
            return
        if held["call"]:
            self.others[rank] = held["call"]

    async def _end(self, made: tuple[int, str]) -> None:
        await asyncio.to_thread(self._end_one, *made)

    def _end_one(self, rank: int, call: str) -> None:
        if self._down:  # another call was tried for all of the time
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
        """Seconds that are left for all of them together."""
        return max(0.0, self._deadline - self._backoff.clock())

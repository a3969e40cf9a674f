"""Adopting a committed sync: update the own shards, take the others' as published, and finish what others left undone.

Who does what, and when, is decided in :mod:`.._round._shares`.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ..._errors import CorruptedObjectError, SyncTimeoutError
from .._round._shares import (
    Adopt,
    Compute,
    GiveUp,
    KeepWaiting,
    Pending,
    Shares,
    on_pending,
)
from .._states._publish import publish_previous, write_done
from ._compute import Computation
from ._published import adopt_listed, listed
from ._result import Result

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..._timing import Wait
    from .._life._life import Life
    from .._log._records import Commit

_log = logging.getLogger("diloco_core")


class Adoption:
    """One life's adoption of one sync. Used once.

    Sharded: the k-th member owns shards k, k + members, …: it updates and publishes them, and everybody reads them. When
    an owner is late by one grace, the next member does its work; create-once settles a race, and all adopt what is there.
    Gather: everybody updates everything, and some syncs are published.

    Args:
        life: The life.
        commit: The record, to be obeyed as it is.
        local: Whether this life's own contribution is in it, so that it need not be read back.
    """

    def __init__(self, life: Life, commit: Commit, local: bool) -> None:
        self._life = life
        self._commit = commit
        self._local = local
        self._result = Result.of(life, commit)
        self._shares = Shares(
            sync=commit.sync,
            members=tuple(member.rank for member in commit.members),
            rank=life.rank,
            grace=life.settings.grace,
            mending=self._result.mending,
        )
        self._unreadable: CorruptedObjectError | None = None

    def run(self) -> None:
        """Adopt it; afterwards memory and store agree.

        Raises:
            Reload: Inputs are gone because newer state is complete.
            CorruptedObjectError: Inputs are gone or damaged, and nothing newer is there.
            SyncTimeoutError: A shard did not come in time.
        """
        shards = range(self._result.layout.shards)
        if self._life.gather:
            publish_previous(self._life, self._commit, self._shares.member)
            self._compute([list(shards)])
            return
        own = self._shares.own(shards)
        try:
            self._compute([[shard] for shard in own])
        except CorruptedObjectError as error:
            self._leave_to_others(error)
            own = []
        self._take([shard for shard in shards if shard not in own])
        if self._shares.designated:
            write_done(self._life, self._commit)

    def _take(self, left: list[int]) -> None:
        """Read published shards, whichever is there first; do the work of owners that are late."""
        life, shares = self._life, self._shares
        turns = sorted({shares.turn(shard) for shard in left})
        patience = shares.patience(left) if left else 0.0
        wait: Wait | None = None

        def expired() -> SyncTimeoutError:
            return self._late(left)

        life.handover.nobody_is_absent()
        while left:
            elapsed = wait.elapsed() if wait else 0.0
            life.handover.are_absent(shares.late_owners(left, elapsed))
            published = listed(self._result, left)
            seen = Pending(tuple(left), tuple(published), readable=self._unreadable is None)
            # One pass: what is published, then what is late. Whatever came may have brought more with it.
            while True:
                decision = on_pending(shares, seen, elapsed=elapsed, patience=patience)
                if isinstance(decision, Adopt):
                    came = adopt_listed(self._result, published)
                elif isinstance(decision, Compute):
                    came = self._stand_in(decision.shards)
                else:
                    break
                left = [shard for shard in left if shard not in came]
                readable = self._unreadable is None
                seen = Pending(tuple(left), (), seen.arrived or bool(came), readable)
            if isinstance(decision, GiveUp) and self._unreadable is not None:
                raise self._unreadable
            if isinstance(decision, KeepWaiting):
                if wait is None:
                    wait = life.wait(life.timing.sync_timeout, expired, turns)
                wait.pause()
        if wait is not None:
            life.traffic.waited += wait.elapsed()

    def _stand_in(self, shards: Sequence[int]) -> list[int]:
        """Do the work of owners that are late; returns what is done, which ends where something cannot be read."""
        done: list[int] = []
        for shard in shards:
            try:
                self._compute([[shard]])
            except CorruptedObjectError as error:
                self._leave_to_others(error)
                break
            done.append(shard)
        return done

    def _leave_to_others(self, error: CorruptedObjectError) -> None:
        """A contribution cannot be read. Its author needs no copy of it, and does the work of owners that are late.

        Raises:
            CorruptedObjectError: There is nobody who could: the sync is a former one, and its members have gone on.
        """
        if self._result.mending or not self._local:
            raise error
        self._unreadable = error
        _log.error(
            "rank %d: %s. Leaving the shards that need it to the other replicas, for %g s.",
            self._life.rank,
            str(error).rstrip("."),
            2 * self._life.settings.grace,
        )

    def _late(self, left: Sequence[int]) -> SyncTimeoutError:
        shares, uri = self._shares, self._life.store.uri
        ranks = sorted({shares.members[shares.owner(shard)] for shard in left})
        text = (
            f"sync {self._commit.sync} at {uri}: the shards of ranks {ranks} did not come in time"
        )
        return SyncTimeoutError(text, ranks)

    def _compute(self, batches: Sequence[Sequence[int]]) -> None:
        Computation(self._result, local=self._local).run(batches)

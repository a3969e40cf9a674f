"""Adopting a committed sync.

An incarnation updates its own shards, takes those of others as published, and computes those that
are late. Which incarnation does what, and when, is decided in :mod:`.._round._shares`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from diloco_protocol.telemetry import Phase

from ..._errors import CorruptedObjectError, SyncTimeoutError, UnequalSyncsError
from ..._exchange._endings import named_ranks
from ..._timing import Wait
from .._claims import check_claim, check_run
from .._incarnation._incarnation import Incarnation
from .._records._keys import Delta, deltas
from .._records._records import Commit, Rollback
from .._repair import ask_for_repair, readable_done
from .._round._reload import ReloadError, Why
from .._round._shares import Shares
from .._states._publish import publish_previous, write_done
from ._compute import Computation
from ._result import Result, adopt_published


class Adoption:
    """One incarnation's adoption of one sync. Used once.

    Sharded: the k-th member owns the shards k, k + members, …: it updates and publishes them, and
    all incarnations read them. If an owner is late by one grace, the next member does its work.
    Since a shard is created only once, a race does no harm: all incarnations adopt what is there.
    Gather: every incarnation updates all shards, and some syncs are published.

    Args:
        incarnation: The incarnation.
        commit: The record, to be obeyed as it is.
        local: Whether the record names this incarnation's own contribution, so that it need not be
            read from the store.
    """

    def __init__(self, incarnation: Incarnation, commit: Commit, local: bool) -> None:
        self._incarnation = incarnation
        self._commit = commit
        self._local = local
        progress = incarnation.fragments[commit.fragment]
        mending = incarnation.damage.mending.get(commit.fragment) == commit.sync
        done = readable_done(incarnation, commit.sync, commit.fragment) if mending else None
        self._result = Result(incarnation, commit, progress, mending, done)
        self._shares = Shares(
            sync=commit.sync,
            members=tuple(member.rank for member in commit.members),
            rank=incarnation.rank,
            grace=incarnation.settings.grace,
            mending=mending,
            fixed=incarnation.fixed,
        )
        self._unreadable: CorruptedObjectError | None = None
        self._ended: ReloadError | None = None
        self._asked = False
        self._missing: Sequence[int] = ()

    def run(self) -> None:
        """Adopt the sync; afterwards memory and store agree.

        Raises:
            CorruptedObjectError: Contributions are gone or damaged, and there is no newer state.
            ReloadError: Contributions are gone because a newer state is complete, or memory does
                not hold what it should.
            SyncTimeoutError: A shard was not published in time.
        """
        shards = range(self._result.job.layout.shards)
        if self._incarnation.gather:
            publish_previous(self._incarnation, self._commit, self._shares.member)
            self._compute([list(shards)])
            return
        own_shards = self._shares.own(shards)
        try:
            self._compute([[shard] for shard in own_shards])
        except CorruptedObjectError as error:
            self._leave_to_others(error)
            own_shards = []
        self._take([shard for shard in shards if shard not in own_shards])
        if self._shares.designated:
            write_done(self._incarnation, self._commit)

    def _take(self, missing: list[int]) -> None:
        """Adopt the missing shards as they are published; compute those whose owners are late."""
        incarnation, shares = self._incarnation, self._shares
        turns = [] if shares.fixed else sorted({shares.turn(shard) for shard in missing})
        patience = shares.patience(missing) if missing else 0.0
        wait: Wait | None = None

        def expired() -> Exception:
            self._look(missing, final=True)
            return self._ended or self._damage(missing) or self._late(missing)

        def notice(seconds: float) -> str:
            owners = named_ranks(self._owners(missing))
            return (
                f"rank {incarnation.rank}: sync {self._commit.sync} is decided, and has been "
                f"waiting for the shards of {owners} for {seconds:.0f} s, and gives up after "
                f"{incarnation.timing.sync_timeout:g} s at the latest (sync_timeout)"
            )

        incarnation.handover.absent = set()
        while missing:
            incarnation.doing.now(Phase.ADOPTING)
            self._missing = missing
            elapsed = wait.elapsed() if wait else 0.0
            incarnation.handover.absent |= shares.late_owners(missing, elapsed)
            # First the published shards, then the late ones.
            arrived = adopt_published(self._result, missing)
            missing = [shard for shard in missing if shard not in arrived]
            if self._unreadable is None:
                arrived += self._stand_in(shares.late(missing, elapsed))
                missing = [shard for shard in missing if shard not in arrived]
            if missing and not arrived and self._unreadable is not None and elapsed >= patience:
                raise self._unreadable
            if missing and self._ended is not None:
                raise self._ended
            # If any arrived, more may have, so look again at once.
            if missing and not arrived:
                if wait is None:
                    wait = incarnation.store.wait(
                        incarnation.timing.sync_timeout,
                        expired,
                        lambda: self._look(self._missing),
                        alarms=turns,
                        notice=notice,
                        notice_after=incarnation.notice_after if incarnation.fixed else math.inf,
                    )
                incarnation.doing.now(Phase.WAITING, self._owners(missing))
                wait.pause()
        if wait is not None:
            incarnation.traffic.waited += wait.elapsed()

    def _look(self, missing: Sequence[int], *, final: bool = False) -> None:
        """Fixed: look for reasons why the owners of the missing shards may never publish them."""
        incarnation = self._incarnation
        if incarnation.others is None:
            return
        check_run(incarnation)
        # If a newer incarnation has finished this sync, nothing is published for this one.
        check_claim(incarnation)
        following = self._commit.sync + 1
        owners = {*self._owners(missing)} - {incarnation.rank}
        listing = incarnation.store.list(deltas(following))
        damage = self._damage(missing)
        gone_on = {delta.rank for delta in filter(None, map(Delta.parse, listing))}
        damaged = {*self._owners([shard for shard in missing if shard in self._result.damaged])}
        if damage is not None and incarnation.takes_means and damaged <= gone_on:
            raise damage  # they hold other tensors by now
        try:
            incarnation.others.check(incarnation, owners, following, listing, final=final)
        except UnequalSyncsError as error:
            if damage is None:
                raise
            raise damage from error
        record = incarnation.log(following)
        if isinstance(record, Rollback):
            self._ended = ReloadError(Why.WENT_BACK, record)
        if self._result.damaged and not self._asked:
            self._asked = True
            ask_for_repair(incarnation)

    def _stand_in(self, shards: Sequence[int]) -> list[int]:
        """Compute shards whose owners are late.

        Returns those that are done: it stops if a contribution cannot be read.
        """
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
        """Leave shards to others, because a contribution cannot be read.

        The incarnation that made the contribution holds it in memory, and does the work of owners
        that are late.

        Raises:
            CorruptedObjectError: No incarnation could do it, since this is an earlier sync, whose
                members have gone on.
        """
        if self._result.mending or not self._local or self._incarnation.fixed:
            raise error
        self._unreadable = error
        self._incarnation.say.error(
            "%s. Leaving the shards that need it to the other replicas, and waiting for them for "
            "%g s.",
            str(error).rstrip("."),
            2 * self._incarnation.settings.grace,
        )

    def _damage(self, shards: Sequence[int]) -> CorruptedObjectError | None:
        """The error for the first of these shards that is there, but damaged."""
        damaged = self._result.damaged
        found = next((shard for shard in shards if shard in damaged), None)
        if found is None:
            return None
        (owner,) = self._owners([found])
        return CorruptedObjectError(
            f"{damaged[found].rstrip('.')}. Rank {owner}, which had the values, has not written "
            "them again"
        )

    def _owners(self, shards: Sequence[int]) -> list[int]:
        """The ranks that these shards belong to."""
        return sorted({self._shares.members[self._shares.owner(shard)] for shard in shards})

    def _late(self, missing: Sequence[int]) -> SyncTimeoutError:
        incarnation, ranks = self._incarnation, self._owners(missing)
        return SyncTimeoutError(
            f"sync {self._commit.sync} at {incarnation.store.uri} is decided, but the shards of "
            f"ranks {ranks} were not published within {incarnation.timing.sync_timeout:g} s "
            "(sync_timeout). Look at their logs. The run can be resumed from its prefix.",
            ranks,
        )

    def _compute(self, batches: Sequence[Sequence[int]]) -> None:
        self._incarnation.doing.now(Phase.UPDATING)
        Computation(self._result, local=self._local).run(batches)

"""One sync over an object store, step by step: contribute, commit, reduce and update, publish, adopt."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ..._arithmetic._clip import measure_norms
from ..._arithmetic._rate import chosen
from ..._arithmetic._sharded import carried_groups
from ..._errors import RunExistsError, SyncTimeoutError
from ..._exchange._endings import describe, named_ranks
from ..._exchange._report import SyncReport
from ..._exchange._traffic import Traffic
from ..._store._copies import copy_key
from ..._timing import Wait
from .._records._repairs import Repairs
from ._adopt import Adoption
from ._members import Member, Members
from ._objects import SyncObjects, state_key
from ._published import OwnShards
from ._reduce import Reduction

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ..._arithmetic._sync_job import SyncJob
    from ..._errors import StoreError
    from ..._exchange._endings import Progress
    from .._participant import Participant


class StoreSync:
    """One sync of one replica, in two halves. It runs once; after that, it can still write damaged shards again.

    Args:
        participant: What stays the same from sync to sync.
        progress: How many syncs came before this one.
        job: What is synced.
        previous: The sync before this one.
        steps: How many inner steps of this rank the sync counts.
    """

    def __init__(
        self,
        participant: Participant,
        progress: Progress,
        job: SyncJob,
        previous: StoreSync | None = None,
        steps: int = 0,
    ) -> None:
        self._participant = participant
        self._progress = progress
        self._job = job
        self._previous = previous
        self._owned = participant.owned(job.layout)
        self._groups = carried_groups(job)
        self._proposed = job.contribution.proposal.rate(participant.rank)
        self._amount = job.contribution.amount
        self._description = describe(job.kind, job.name, progress)
        self._traffic = Traffic()
        self._contributing = 0.0  # seconds
        number = progress.number
        self._objects = SyncObjects(participant, number, job, steps)
        self._repairs = Repairs(participant.store, participant.rank, number)
        self._members = Members(participant, self._objects, number, job.name, self._description)
        self._own_shards = OwnShards(participant.store, self._objects, self._repairs, self._traffic)

    def contribute(self) -> None:
        """The first half: store this replica's contribution."""
        clock = self._participant.timing.clock
        start = clock()
        participant = self._participant
        measure_norms(self._job, participant.rank, participant.scratch)
        (key,) = self.contributed
        member = Member(key, participant.rank, self._groups)
        parts = partial(self._objects.format.parts, member, participant.scratch)
        self._traffic.sent += participant.store.put(key, parts)
        self._contributing = clock() - start

    def ready(self) -> bool:
        """Whether all replicas have contributed."""
        return not self._members.missing_ranks()

    def finish(self, obsolete: Iterable[str]) -> SyncReport:
        """The second half: wait for the others, update this replica's shards, and adopt all others.

        Args:
            obsolete: Keys of this replica that are no longer needed when all replicas have contributed to this sync.
        """
        clock, traffic = self._participant.timing.clock, self._traffic
        start = clock()
        self._wait_for_commit()
        # All replicas have contributed to this sync, so all have finished the one before.
        self._previous = None
        self._job.rate = self._objects.rate = chosen(self._members.proposed())
        reduction = Reduction(self._participant, self._job, self._objects, self._members, traffic)
        reduction.run(self._progress.next, partial(self._publish, [*obsolete]))
        self._adopt()
        if self._job.kind == "initial":
            # There is no older state yet that a run could be resumed from if a shard of this one is lost.
            for shard in self._owned:
                self._own_shards.copy(shard)
        return SyncReport(
            sync=self._progress.number,
            fragment=self._job.name,
            committed=True,
            members=self._participant.world_size,
            bytes_sent=traffic.sent,
            bytes_received=traffic.received,
            wait_seconds=traffic.waited,
            exchange_seconds=self._contributing + clock() - start - traffic.waited,
            weights=self._members.shares(self._job.terms.weighting),
            clipped=reduction.clipped,
        )

    @property
    def contributed(self) -> list[str]:
        """Keys of this replica's contribution."""
        participant, objects = self._participant, self._objects
        return [objects.delta_key(participant.rank, self._groups, self._proposed, self._amount)]

    @property
    def superseded(self) -> list[str]:
        """Keys of the shards of this replica, and of their copies, in whose place this sync has put newer ones."""
        initial_syncs = self._progress.number - self._progress.syncs
        keys = []
        for sync in self._superseded_syncs():
            for shard in self._owned:
                key = state_key(self._participant.run_of(sync), sync, shard)
                keys += [key, copy_key(key)] if sync < initial_syncs else [key]
        return keys

    def _superseded_syncs(self) -> Sequence[int]:
        coded = self._job.coded
        if coded is None:
            return self._job.contribution.supersedes
        if not coded.full.is_full(self._progress.number):
            return ()  # this sync has only an update, so what came before is still needed
        return [
            sync for last in self._job.contribution.supersedes for sync in coded.full.needed(last)
        ]

    def repair(self) -> None:
        """Write those shards of this replica again that others have found damaged; see :meth:`._published.OwnShards.repair`."""
        self._own_shards.repair()

    def check_not_resumed(self, cause: StoreError) -> None:
        """Find out whether an object is missing because the run was resumed without this replica.

        Raises:
            RunExistsError: It was; ``cause`` is the error that the missing object led to.
        """
        try:
            self._participant.check_not_resumed()
        except RunExistsError as error:
            raise error from cause

    def _publish(self, obsolete: list[str], shard: int) -> None:
        """Store a shard after its update. Before the first one, delete the keys in ``obsolete``."""
        # Computing the update may have taken long, and the process may have been stopped meanwhile. If the run was resumed
        # without this replica, what is obsolete here may be what the run was resumed from.
        self._participant.check_not_resumed()
        if obsolete:
            self._participant.store.delete(obsolete, unread=True)
            obsolete.clear()
        self._own_shards.publish(shard)

    def _wait_for_commit(self) -> None:
        """Wait for the commit record. A replica that sees all contributions writes it; the others wait for that one key."""
        members, participant = self._members, self._participant
        missing = members.missing_ranks()

        def look_around() -> None:
            nonlocal missing
            missing = members.missing_ranks()
            participant.check_claim()
            if missing:
                if self._previous is not None:
                    self._previous.repair()
                participant.liveness.check(missing, self._progress, self._description)
            else:
                members.commit()

        if not missing:
            members.commit()
        wait = self._wait(look_around, lambda: missing)
        while not members.committed():
            wait.pause()
        if missing:
            self._traffic.waited += wait.elapsed()

    def _adopt(self) -> None:
        """Read the shards of the other owners, in the order in which they are published."""
        participant = self._participant
        adoption = Adoption(
            participant, self._job.layout, self._objects, self._repairs, self._traffic
        )

        def look_around() -> None:
            participant.check_claim()
            self.repair()
            participant.liveness.check(adoption.owners(), self._progress, self._description)
            adoption.check_repairs()

        wait: Wait | None = None
        while adoption.pending:
            if adoption.adopt_published():
                if wait is not None:
                    self._traffic.waited += wait.elapsed()
                    wait = None
                continue
            if wait is None:
                wait = self._wait(look_around, adoption.owners)
            wait.pause()

    def _wait(self, look_around: Callable[[], None], missing: Callable[[], list[int]]) -> Wait:
        store, timing = self._participant.store, self._participant.timing
        timeout = timing.sync_timeout

        def expired() -> Exception:
            damage = self._repairs.asked_for()
            if damage is not None:
                return damage
            ranks = missing()
            reason = (
                f"it was still waiting for {named_ranks(ranks)}. Look at the logs of the missing ranks; if they are only slow, "
                "raise sync_timeout."
                if ranks
                else "no rank is missing, so this process itself stood still or was slow. Look at what its machine did, and at "
                "the logs of the other ranks: they may have gone on without it."
            )
            return SyncTimeoutError(
                f"{self._description} at {store.uri} was not completed within {timeout:g} s; {reason}",
                ranks,
            )

        def notice(seconds: float) -> str:
            ranks = missing()
            if not ranks:
                return ""
            return (
                f"rank {self._participant.rank}: {self._description} has been waiting for {named_ranks(ranks)} for "
                f"{seconds:.0f} s, and gives up after {timeout:g} s"
            )

        return Wait(
            timing,
            store.near,
            timeout,
            look_around,
            expired,
            downtime=lambda: store.downtime,
            notice=notice,
        )

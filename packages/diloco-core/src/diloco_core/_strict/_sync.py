"""One sync over an object store, step by step: contribute, commit, reduce and update, publish, adopt."""

from __future__ import annotations

import contextlib
import logging
import re
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from .._arithmetic._layout import Rule
from .._arithmetic._reduction import blocks, reduce_shards
from .._arithmetic._sent import as_sent, sent_bytes
from .._arithmetic._sharded import carried_groups, carries, contributions, may_carry, with_unchanged
from .._errors import CorruptedObjectError, MismatchError, SyncTimeoutError
from .._exchange._endings import describe, named_ranks
from .._exchange._report import SyncReport
from .._store._ahead import open_ahead
from .._store._api import block_bytes_of
from .._store._reread import read_again
from .._timing import Wait
from .._wire._published import Shard
from .._wire._sections import fingerprint, seed
from ._delta import DeltaFile, DeltaPlan, ShardDelta
from ._records import check_commit, commit, commit_key
from ._repairs import Repairs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    import torch

    from .._arithmetic._layout import Layout, Piece
    from .._arithmetic._sharded import Scratch, Source
    from .._arithmetic._sync_job import SyncJob
    from .._exchange._endings import Progress
    from .._store._api import Buffer, ObjectReader
    from .._store._patient import Patient
    from .._timing import Timing
    from .._wire._published import Sums
    from ._liveness import Liveness

_log = logging.getLogger("diloco_core")

_DELTA = re.compile(
    r"deltas/[0-9]{8}/([0-9]{5})\.([0-9a-f]{16})\.[0-9a-f]{16}\.([0-9a-f]{1,16})\.safetensors"
)


@dataclass(frozen=True, slots=True)
class Participant:
    """This replica in its run: what stays the same from sync to sync."""

    store: Patient
    rank: int
    world_size: int
    run: str  # the name of the run; see _records.run_name
    timing: Timing
    liveness: Liveness
    chunk_bytes: int
    scratch: Scratch
    check_claim: Callable[[], None]  # raises an error if another run uses the prefix by now

    def owned(self, layout: Layout) -> range:
        """The shards that this replica updates and publishes."""
        return range(self.rank, layout.shards, self.world_size)


class StoreSync:
    """One sync of one replica, in two halves. It runs once; after that, it can still write damaged shards again.

    Args:
        participant: What stays the same from sync to sync.
        progress: How many syncs came before this one.
        job: What is synced.
        previous: The sync before this one.
    """

    def __init__(
        self,
        participant: Participant,
        progress: Progress,
        job: SyncJob,
        previous: StoreSync | None = None,
    ) -> None:
        self._p = participant
        self._number = progress.number
        self._progress = progress
        self._job = job
        self._layout = job.layout
        # This is also made from the name of the run. A process of an earlier run under this prefix that is still running
        # writes other keys, and what it may have written under the same keys does not match the checksums.
        self._fingerprint = fingerprint(participant.run, job.fingerprint)
        self._owned = participant.owned(job.layout)
        self._groups = carried_groups(job)
        # The key of each rank's contribution, which says what it carries; taken from the listing or from the commit record.
        self._members: dict[int, str] = {}
        self._description = describe(job.kind, job.name, progress)
        self._listing: dict[str, int] = {}
        self._plans: dict[tuple[bool, int], DeltaPlan] = {}
        self._sums: dict[int, Sums] = {}
        self._repairs = Repairs(participant.store, participant.rank, progress.number)
        self._previous = previous
        self._sent = 0
        self._received = 0
        self._contributing = 0.0
        self._waited = 0.0

    def contribute(self) -> None:
        """The first half: store this replica's contribution."""
        start = self._p.timing.clock()
        self._sent += self._p.store.put(
            self._delta_key(self._p.rank, self._groups), self._delta_parts
        )
        self._contributing = self._p.timing.clock() - start

    def ready(self) -> bool:
        """Whether all replicas have contributed."""
        return not self._missing_ranks()

    def finish(self, obsolete: Iterable[str]) -> SyncReport:
        """The second half: wait for the others, update this replica's shards, and adopt all others.

        Args:
            obsolete: Keys of this replica that are no longer needed when all replicas have contributed to this sync.
        """
        clock = self._p.timing.clock
        start = clock()
        self._wait_for_commit()
        # All replicas have contributed to this sync, so all have finished the one before.
        self._previous = None
        self._p.store.delete(obsolete, unread=True)
        self._reduce()
        self._adopt()
        return SyncReport(
            sync=self._number,
            fragment=self._job.name,
            committed=True,
            members=self._p.world_size,
            bytes_sent=self._sent,
            bytes_received=self._received,
            wait_seconds=self._waited,
            exchange_seconds=self._contributing + clock() - start - self._waited,
        )

    @property
    def contributed(self) -> list[str]:
        """Keys of this replica's contribution."""
        return [self._delta_key(self._p.rank, self._groups)]

    def obsolete_keys(self) -> list[str]:
        """Keys of this replica that may be deleted when all replicas have finished this sync."""
        state = (
            state_key(self._p.run, sync, shard)
            for sync in self._job.supersedes
            for shard in self._owned
        )
        return [self._delta_key(self._p.rank, self._groups), *state]

    def repair(self) -> None:
        """Write those shards of this replica again that others have found damaged.

        Raises:
            CorruptedObjectError: A shard cannot be written again, because its values have changed since.
        """
        for shard in self._repairs.wanted():
            if shard not in self._sums:
                continue
            origin = f"{self._p.store.uri}/{state_key(self._p.run, self._number, shard)}"
            if self._shard(shard).sums(self._metadata("state")) != self._sums[shard]:
                raise CorruptedObjectError(
                    f"{origin} is damaged and cannot be written again, because the tensors that it was made from have changed "
                    "since. The replicas no longer hold the same values: start again from a checkpoint, on another prefix."
                )
            _log.error(
                "%s is damaged in the store and is written again with the same content.", origin
            )
            self._publish(shard)
            self._repairs.done(shard)

    def _delta_parts(self) -> Iterator[Buffer]:
        # What this replica contributes to its own shards is not sent, but it is checked now: an infinite value or NaN must be
        # refused before the sync can be committed.
        for shard in self._owned:
            for _ in self._contributions(shard):
                pass
        yield from self._delta_file(self._p.rank, self._groups).parts(self._sent_contributions)

    def _contributions(self, shard: int) -> Iterator[torch.Tensor]:
        return contributions(self._job, shard, self._p.rank, self._p.chunk_bytes, self._p.scratch)

    def _sent_contributions(self, shard: int) -> Iterator[torch.Tensor]:
        participant = self._p
        return contributions(
            self._job,
            shard,
            participant.rank,
            participant.chunk_bytes,
            participant.scratch,
            groups=self._groups,
            encoded=True,
        )

    def _wait_for_commit(self) -> None:
        """Wait for the commit record. A replica that sees all contributions writes it; the others wait for that one key."""
        missing = self._missing_ranks()

        def look_around() -> None:
            nonlocal missing
            missing = self._missing_ranks()
            self._p.check_claim()
            if missing:
                if self._previous is not None:
                    self._previous.repair()
                self._p.liveness.check(missing, self._progress, self._description)
            else:
                self._commit()

        if not missing:
            self._commit()
        wait = self._wait(look_around, lambda: missing)
        while not self._committed():
            wait.pause()
        if missing:
            self._waited += wait.elapsed()

    def _missing_ranks(self) -> list[int]:
        self._listing = self._p.store.list(f"deltas/{self._number:08}/")
        with_other_tensors = set()
        for key in self._listing:
            match = _DELTA.fullmatch(key)
            if match is None or match[2] != self._p.run[:16]:
                continue
            if self._carried(int(match[1]), key) is not None:
                self._members[int(match[1])] = key
            else:
                with_other_tensors.add(int(match[1]))
        missing = [rank for rank in range(self._p.world_size) if rank not in self._members]
        for rank in missing:
            if rank in with_other_tensors:
                raise MismatchError(
                    f"in {self._description}, rank {rank} contributes other tensors than rank {self._p.rank}: all replicas must "
                    "sync the same tensors, with the same shapes and dtypes, in the same order"
                )
        return missing

    def _commit(self) -> None:
        record = commit(
            self._number, self._job.name, [key for _, key in sorted(self._members.items())]
        )
        self._p.store.put(commit_key(self._number), lambda: [record])

    def _committed(self) -> bool:
        key = commit_key(self._number)
        origin = f"{self._p.store.uri}/{key}"

        def read() -> bool:
            data = self._p.store.get(key)
            if data is not None:
                members = check_commit(
                    data, self._number, self._job.name, self._p.world_size, self._carried, origin
                )
                self._members = dict(enumerate(members))
            return data is not None

        try:
            return read_again(self._p.timing, read)
        except CorruptedObjectError as error:
            if self._missing_ranks():
                return False
            # The record holds only what all replicas know, and all of them would write the same bytes.
            _log.error(
                "a commit record is damaged and is written again with the same content: %s", error
            )
            self._commit()
            return True

    def _reduce(self) -> None:
        """Update this replica's shards one after another, and publish each before the next is updated."""
        own_rank, store = self._p.rank, self._p.store
        carried = {
            rank: self._carried(rank, key) or 0 for rank, key in sorted(self._members.items())
        }
        read_again(self._p.timing, self._list_members)
        with contextlib.ExitStack() as stack:
            deltas = {
                (shard, rank): stack.enter_context(self._delta(shard, rank, groups))
                for shard in self._owned
                for rank, groups in carried.items()
                if rank != own_rank
            }
            block_bytes = block_bytes_of(store.store)
            if not store.near:
                self._announce(deltas, carried, block_bytes)
            for shard in self._owned:
                sources: list[Source] = [
                    as_sent(self._job)
                    if rank == own_rank
                    else with_unchanged(self._job, groups, partial(self._read, deltas[shard, rank]))
                    for rank, groups in carried.items()
                ]
                reduce_shards(
                    self._job,
                    [shard],
                    sources,
                    self._p.chunk_bytes,
                    self._p.scratch,
                    sync=self._progress.next,
                    block_bytes=block_bytes,
                )
                self._sent += self._publish(shard)

    def _list_members(self) -> None:
        """List the contributions again if the last listing, which has their sizes, is older than the record that names them."""
        members = self._members.values()
        if any(key not in self._listing for key in members):
            self._listing = self._p.store.list(f"deltas/{self._number:08}/")
        for key in members:
            if key not in self._listing:
                raise CorruptedObjectError(
                    f"{self._p.store.uri}/{key} is gone: something deletes objects there."
                )

    def _announce(
        self,
        deltas: Mapping[tuple[int, int], ShardDelta],
        carried: Mapping[int, int],
        block_bytes: int,
    ) -> None:
        """Tell the readers what will be read, in the order of use."""
        for shard in self._owned:
            for block in blocks(self._layout, [shard], self._p.chunk_bytes, block_bytes):
                for rank, groups in carried.items():
                    if rank != self._p.rank:
                        deltas[shard, rank].announce(self._sent_bytes(rank, groups, block))

    def _delta(self, shard: int, rank: int, groups: int) -> ShardDelta:
        key = self._members[rank]
        return ShardDelta(
            self._p.store,
            key,
            self._listing[key],
            self._delta_file(rank, groups),
            shard,
            self._p.timing,
        )

    def _sent_bytes(self, rank: int, groups: int, block: Iterable[tuple[int, Piece]]) -> int:
        """How many bytes of a block a rank sends."""
        sent = (
            piece
            for _, piece in block
            if carries(groups, piece.group)
            and (rank == 0 or self._layout.groups[piece.group].rule is not Rule.FIRST)
        )
        return sum(sent_bytes(self._job.codec, self._layout, piece) for piece in sent)

    def _publish(self, shard: int) -> int:
        """Store one of this replica's shards after its update. Returns its size in bytes."""

        def remember(sums: Sums) -> None:
            self._sums[shard] = sums

        published = self._shard(shard)
        return self._p.store.put(
            state_key(self._p.run, self._number, shard),
            lambda: published.parts(self._metadata("state"), remember),
        )

    def _adopt(self) -> None:
        """Read the shards of the other owners, in the order in which they are published."""
        pending = [shard for shard in range(self._layout.shards) if shard not in self._owned]

        def owners() -> list[int]:
            return sorted({self._owner(shard) for shard in pending})

        def look_around() -> None:
            self._p.check_claim()
            self.repair()
            self._p.liveness.check(owners(), self._progress, self._description)
            for shard in pending:
                self._repairs.check(shard, self._p.liveness.ending(self._owner(shard)))

        wait: Wait | None = None
        while pending:
            arrived = self._adopt_published(pending)
            pending = [shard for shard in pending if shard not in arrived]
            if arrived or not pending:
                if wait is not None:
                    self._waited += wait.elapsed()
                    wait = None
                continue
            if wait is None:
                wait = self._wait(look_around, owners)
            wait.pause()

    def _adopt_published(self, shards: list[int]) -> list[int]:
        """Adopt those of these shards that are published by now, and return them."""
        store = self._p.store
        listing = store.list(f"state/{self._number:08}/")
        keys = {state_key(self._p.run, self._number, shard): shard for shard in shards}
        ready = {
            key: listing[key]
            for key in keys
            if key in listing and not self._repairs.pending(keys[key])
        }

        def announce(key: str, reader: ObjectReader) -> None:
            self._shard(keys[key]).announce(reader, f"{store.uri}/{key}")

        adopted = []
        with open_ahead(store.store, ready, announce) as readers:
            for key, reader in zip(ready, readers, strict=True):
                try:
                    self._adopt_shard(key, keys[key], reader)
                except CorruptedObjectError as error:
                    self._repairs.ask(keys[key], self._owner(keys[key]), error)
                    continue
                self._received += sum(map(self._layout.piece_bytes, self._layout.shard(keys[key])))
                adopted.append(keys[key])
        return adopted

    def _adopt_shard(self, key: str, shard: int, opened: ObjectReader | None) -> None:
        origin = f"{self._p.store.uri}/{key}"

        def read() -> None:
            nonlocal opened
            reader, opened = opened, None
            adopted = self._p.store.read(
                key,
                lambda reader: self._shard(shard).adopt(reader, origin, self._p.scratch),
                reader,
            )
            if adopted is None:
                raise CorruptedObjectError(
                    f"{origin} was published and has vanished: something deletes objects there."
                )

        read_again(self._p.timing, read)

    def _read(self, delta: ShardDelta, piece: Piece, out: torch.Tensor) -> torch.Tensor:
        delta.read(out)
        self._received += sent_bytes(self._job.codec, self._layout, piece)
        return out

    def _wait(self, look_around: Callable[[], None], missing: Callable[[], list[int]]) -> Wait:
        timeout = self._p.timing.sync_timeout

        def expired() -> Exception:
            damage = self._repairs.asked_for()
            if damage is not None:
                return damage
            return SyncTimeoutError(
                f"{self._description} at {self._p.store.uri} was not completed within {timeout:g} s; it was still waiting for "
                f"{named_ranks(missing())}. Look at the logs of the missing ranks; if they are only slow, raise sync_timeout.",
                missing(),
            )

        def notice(seconds: float) -> str:
            ranks = missing()
            if not ranks:
                return ""
            return (
                f"rank {self._p.rank}: {self._description} has been waiting for {named_ranks(ranks)} for {seconds:.0f} s, and "
                f"gives up after {timeout:g} s"
            )

        store = self._p.store
        return Wait(
            self._p.timing,
            store.near,
            timeout,
            look_around,
            expired,
            downtime=lambda: store.downtime,
            notice=notice,
        )

    def _owner(self, shard: int) -> int:
        return shard % self._p.world_size

    def _delta_file(self, rank: int, carried: int) -> DeltaFile:
        is_rank_zero = rank == 0
        if (is_rank_zero, carried) not in self._plans:
            participant = self._p
            self._plans[is_rank_zero, carried] = DeltaPlan(
                self._layout,
                participant.world_size,
                participant.chunk_bytes,
                carried,
                is_rank_zero=is_rank_zero,
                codec=self._job.codec,
            )
        seed_of = partial(self._seed, "delta", rank, carried)
        return DeltaFile(
            self._plans[is_rank_zero, carried],
            rank,
            seed_of,
            self._metadata("delta", rank=rank),
        )

    def _shard(self, shard: int) -> Shard:
        return Shard(self._job, shard, self._seed, self._p.chunk_bytes)

    def _seed(self, *parts: object) -> int:
        return seed(self._fingerprint, self._number, *parts)

    def _metadata(self, kind: str, **extra: object) -> dict[str, str]:
        fields = {
            "diloco": kind,
            "sync": self._number,
            "name": self._job.name,
            "fingerprint": self._job.fingerprint,
        }
        return {key: str(value) for key, value in {**fields, **extra}.items()}

    def _delta_key(self, rank: int, groups: int) -> str:
        return f"deltas/{self._number:08}/{rank:05}.{self._p.run[:16]}.{self._job.fingerprint[:16]}.{groups:x}.safetensors"

    def _carried(self, rank: int, key: str) -> int | None:
        """The groups that the contribution with this key carries; None if it is not one of this rank to this sync."""
        match = _DELTA.fullmatch(key)
        groups = int(match[3], 16) if match is not None else -1
        valid = (
            groups >= 0 and key == self._delta_key(rank, groups) and may_carry(self._layout, groups)
        )
        return groups if valid else None


def state_key(run: str, sync: int, shard: int) -> str:
    """Key of a published shard of a strict run; ``run`` is the name of the run."""
    return f"state/{sync:08}/{shard:05}.{run[:16]}.safetensors"

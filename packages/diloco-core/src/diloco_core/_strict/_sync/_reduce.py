"""What a replica computes in a sync: the update of its own shards from the contributions of all replicas."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING

from ..._arithmetic._clip import Clipping
from ..._arithmetic._layout import Rule
from ..._arithmetic._reduction import blocks, reduce_shards
from ..._arithmetic._sent import as_sent, sent_bytes
from ..._arithmetic._sharded import carries, with_unchanged
from ..._store._api import block_bytes_of
from ..._store._reread import read_again
from .._records._delta import DeltaFile, ShardDelta

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import torch

    from ..._arithmetic._clip import Clipped
    from ..._arithmetic._layout import Piece
    from ..._arithmetic._sharded import Source
    from ..._arithmetic._sync_job import SyncJob
    from ..._exchange._traffic import Traffic
    from .._participant import Participant
    from ._members import Members
    from ._objects import SyncObjects


class Reduction:
    """The update of one replica's shards in one sync.

    Args:
        participant: What stays the same from sync to sync.
        job: What is synced.
        objects: The objects of the sync.
        members: The contributions that it is made of.
        traffic: Counts what is read.

    Attributes:
        clipped: How the contributions were clipped, once it has run; see :attr:`.SyncReport.clipped`.
    """

    def __init__(
        self,
        participant: Participant,
        job: SyncJob,
        objects: SyncObjects,
        members: Members,
        traffic: Traffic,
    ) -> None:
        self._participant = participant
        self._job = job
        self._objects = objects
        self._members = members
        self._traffic = traffic
        self.clipped: tuple[Clipped, ...] = ()

    def run(self, sync: int, publish: Callable[[int], None]) -> None:
        """Update the shards one after another, and publish each before the next is updated.

        Args:
            sync: The number of the sync in messages.
            publish: Stores a shard that has been updated.
        """
        participant, job = self._participant, self._job
        owned = participant.owned(job.layout)
        carried = self._members.carried()
        read_again(participant.timing, self._members.list_again)
        with contextlib.ExitStack() as stack:
            norms = self._norms(carried, stack) if job.terms.clip else []
            deltas = {
                (shard, rank): stack.enter_context(self._open(shard, rank, groups))
                for shard in owned
                for rank, groups in carried.items()
                if rank != participant.rank
            }
            block_bytes = block_bytes_of(participant.store.store)
            if not participant.store.near:
                self._announce(deltas, carried, block_bytes)
            clipping = self._clipping(norms)
            for shard in owned:
                sources: list[Source] = [
                    as_sent(job)
                    if rank == participant.rank
                    else with_unchanged(job, groups, partial(self._read, deltas[shard, rank]))
                    for rank, groups in carried.items()
                ]
                if clipping is not None:
                    sources = [clipping.clipped(rank, each) for rank, each in enumerate(sources)]
                reduce_shards(
                    job,
                    [shard],
                    sources,
                    participant.chunk_bytes,
                    participant.scratch,
                    sync=sync,
                    block_bytes=block_bytes,
                    shares=self._members.shares(job.terms.weighting),
                )
                publish(shard)

    def _norms(
        self, carried: Mapping[int, int], stack: contextlib.ExitStack
    ) -> list[Callable[[], Sequence[float]]]:
        """Functions that read the norms of the contributions, in rank order."""
        participant, members = self._participant, self._members

        def of(rank: int, groups: int) -> Callable[[], Sequence[float]]:
            if rank == participant.rank:
                return lambda: self._job.contribution.norms
            file = self._file(rank, groups)
            return file.norms(
                participant.store, members.key(rank), members.size(rank), participant.timing, stack
            )

        return [of(rank, groups) for rank, groups in carried.items()]

    def _file(self, rank: int, groups: int) -> DeltaFile:
        objects, key = self._objects, self._members.key(rank)
        return objects.delta(rank, groups, objects.proposed(key), objects.amount(key))

    def _clipping(self, norms: Sequence[Callable[[], Sequence[float]]]) -> Clipping | None:
        if not norms:
            return None
        clipping = Clipping(self._job, [read() for read in norms])
        self.clipped = clipping.report()
        return clipping

    def _open(self, shard: int, rank: int, groups: int) -> ShardDelta:
        return ShardDelta(
            self._participant.store,
            self._members.key(rank),
            self._members.size(rank),
            self._file(rank, groups),
            shard,
            self._participant.timing,
        )

    def _announce(
        self,
        deltas: Mapping[tuple[int, int], ShardDelta],
        carried: Mapping[int, int],
        block_bytes: int,
    ) -> None:
        """Tell the readers what will be read, in the order of use."""
        participant, layout = self._participant, self._job.layout
        for shard in participant.owned(layout):
            for block in blocks(layout, [shard], participant.chunk_bytes, block_bytes):
                for rank, groups in carried.items():
                    if rank != participant.rank:
                        deltas[shard, rank].announce(self._sent_bytes(rank, groups, block))

    def _sent_bytes(self, rank: int, groups: int, block: Iterable[tuple[int, Piece]]) -> int:
        """How many bytes of a block a rank sends."""
        layout = self._job.layout
        sent = (
            piece
            for _, piece in block
            if carries(groups, piece.group)
            and (rank == 0 or layout.groups[piece.group].rule is not Rule.FIRST)
        )
        return sum(sent_bytes(self._job.terms.codec, layout, piece) for piece in sent)

    def _read(self, delta: ShardDelta, piece: Piece, out: torch.Tensor) -> torch.Tensor:
        delta.read(out)
        self._traffic.received += sent_bytes(self._job.terms.codec, self._job.layout, piece)
        return out

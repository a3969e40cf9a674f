"""The contributions to a sync, opened to be added up: each is read once, in the order of use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

import torch

from ..._arithmetic._clip import Clipping
from ..._arithmetic._layout import Piece
from ..._arithmetic._reduction import blocks
from ..._arithmetic._sharded import Source, as_sent, carries, with_unchanged, without_progress
from ..._store._api import Closing, block_bytes_of
from ..._wire._delta_reader import DeltaReader, once
from .._incarnation._incarnation import Incarnation
from .._records._keys import Delta
from .._records._records import Commit

T = TypeVar("T")


class Inputs(Closing):
    """Contributions to some shards. Not thread-safe.

    Args:
        incarnation: The incarnation that reads them.
        commit: The record that names them, in the order in which they are added up.
        batches: The shards, in the order in which they are updated; those of a batch together.
        local: Whether this incarnation's own contribution is taken from memory.

    Attributes:
        sources: For every member, a source that gives its contribution chunk by chunk.
        block_bytes: How many bytes are read from one contribution before the next one is read.
        clipping: How contributions are clipped, or None. The sources are clipped already.

    Raises:
        ObjectNotFoundError: A contribution is gone.
        CorruptedObjectError: A contribution does not have the size that it should have, or its
            norms are damaged.
    """

    def __init__(
        self,
        incarnation: Incarnation,
        commit: Commit,
        batches: Sequence[Sequence[int]],
        *,
        local: bool,
    ) -> None:
        store = incarnation.store
        self._incarnation = incarnation
        self._job = job = incarnation.fragments[commit.fragment].job
        self._format = form = incarnation.format(commit.fragment)
        self._readers: list[tuple[Delta, DeltaReader]] = []
        self.block_bytes = block_bytes_of(store.store) // (2 if incarnation.gather else 1)
        self.clipping: Clipping | None = None
        self.sources: list[Source] = []
        shards = [shard for batch in batches for shard in batch]

        def again(read: Callable[[], T]) -> T:
            return incarnation.again(lambda: store.attempt(read))

        in_memory = (incarnation.rank, incarnation.epoch) if local else None
        norms: list[Callable[[], Sequence[float]]] = []
        try:
            for member in commit.members:
                if (member.rank, member.epoch) == in_memory:
                    self.sources.append(as_sent(job))
                    norms.append(lambda: job.contribution.norms)
                    continue
                left_out = not set(shards).isdisjoint(form.omit(member.rank))
                reader = form.reader(
                    member,
                    () if left_out else shards,
                    f"{store.uri}/{member.key}",
                    partial(store.store.open, member.key),
                    again if form.verify_first else once,
                )
                self._readers.append((member, reader))
                reader.open()
                norms.append(reader.norms)
                groups = form.sent(member.groups, member.rank)
                source = with_unchanged(job, groups, self._source(reader))
                # What a member has left out is lost with its memory, and counts as nothing learned.
                self.sources.append(without_progress(job) if left_out else source)
            if not store.near:
                self._announce(batches)
            if job.terms.clip:
                self.clipping = Clipping(job, [read() for read in norms])
                self.sources = [*map(self.clipping.clipped, range(len(norms)), self.sources)]
        except BaseException:
            self.close()
            raise

    def verify(self, shards: Iterable[int]) -> None:
        """Verify these shards, which have been read, unless that was done before they were used.

        Raises:
            CorruptedObjectError: What was read is not what was written.
        """
        for shard in shards:
            for _, reader in self._readers:
                reader.verify(shard)

    def close(self) -> None:
        """Close all contributions; repeatable."""
        for _, reader in self._readers:
            reader.close()

    def _announce(self, batches: Iterable[Sequence[int]]) -> None:
        for _, reader in self._readers:
            reader.announce_norms()
        for batch in batches:
            size = self._incarnation.chunk_bytes
            for block in blocks(self._job.layout, batch, size, self.block_bytes):
                sizes: dict[int, dict[int, int]] = {}  # by the groups that are in a contribution
                for member, reader in self._readers:
                    if not set(batch).isdisjoint(self._format.omit(member.rank)):
                        continue
                    groups = self._format.sent(member.groups, member.rank)
                    if groups not in sizes:
                        sizes[groups] = self._sizes(block, groups)
                    reader.announce(sizes[groups], self.block_bytes)

    def _source(self, reader: DeltaReader) -> Source:
        def read(piece: Piece, out: torch.Tensor) -> torch.Tensor:
            reader.read(out)
            size = self._job.layout.sent_bytes(piece, self._job.terms.codec)
            self._incarnation.traffic.received += size
            return out

        return read

    def _sizes(self, block: Iterable[tuple[int, Piece]], groups: int) -> dict[int, int]:
        """For every shard in a block, the bytes of the groups that a contribution carries."""
        sizes: dict[int, int] = {}
        for shard, piece in block:
            if carries(groups, piece.group):
                size = self._job.layout.sent_bytes(piece, self._job.terms.codec)
                sizes[shard] = sizes.get(shard, 0) + size
        return sizes

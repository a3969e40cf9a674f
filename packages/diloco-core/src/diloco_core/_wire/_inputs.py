"""The contributions to a sync, opened to be added up: each is read once, in the order of use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

import torch

from .._arithmetic._clip import Clipping
from .._arithmetic._layout import Piece
from .._arithmetic._reduction import blocks
from .._arithmetic._sharded import Source, as_sent, carries, with_unchanged, without_progress
from .._arithmetic._sync_job import SyncJob
from .._store._api import Closing
from .._store._patient import Patient
from .._store._reread import read_again
from .._timing import Timing
from ._delta import DeltaFormat, Named
from ._delta_reader import DeltaReader, once

T = TypeVar("T")


class Inputs(Closing):
    """Contributions to some shards. Not thread-safe.

    Args:
        job: The sync.
        format: The format of contributions to it.
        store: Where they are.
        timing: Its ``sleep`` is used before anything is read again.
        members: The contributions, in the order in which they are added up.
        own: The one that is taken from memory; None if there is none.
        batches: The shards, in the order in which they are updated; those of a batch together.
        chunk_bytes: Bytes handled at once.
        block_bytes: How many bytes are read from one contribution before the next one is read.
        received: Called with the number of bytes of values whenever some were read.

    Attributes:
        sources: For every member, a source that gives its contribution chunk by chunk.
        block_bytes: As given.
        clipping: How contributions are clipped, or None. The sources are clipped already.

    Raises:
        ObjectNotFoundError: A contribution is gone.
        CorruptedObjectError: A contribution does not have the size that it should have, or its
            norms are damaged.
    """

    def __init__(
        self,
        job: SyncJob,
        format: DeltaFormat,  # noqa: A002 - the name that it has everywhere
        store: Patient,
        timing: Timing,
        members: Sequence[Named],
        own: Named | None,
        batches: Sequence[Sequence[int]],
        *,
        chunk_bytes: int,
        block_bytes: int,
        received: Callable[[int], object],
    ) -> None:
        self._job = job
        self._format = format
        self._received = received
        self._readers: list[tuple[Named, DeltaReader]] = []
        self.block_bytes = block_bytes
        self.clipping: Clipping | None = None
        self.sources: list[Source] = []
        shards = [shard for batch in batches for shard in batch]

        def again(read: Callable[[], T]) -> T:
            return read_again(timing, lambda: store.attempt(read))

        norms: list[Callable[[], Sequence[float]]] = []
        try:
            for member in members:
                if member is own:
                    self.sources.append(as_sent(job))
                    norms.append(lambda: job.contribution.norms)
                    continue
                left_out = not set(shards).isdisjoint(format.omit(member.rank))
                reader = format.reader(
                    member,
                    () if left_out else shards,
                    f"{store.uri}/{member.key}",
                    partial(store.store.open, member.key),
                    again if format.verify_first else once,
                )
                self._readers.append((member, reader))
                reader.open()
                norms.append(reader.norms)
                groups = format.sent(member.groups, member.rank)
                source = with_unchanged(job, groups, self._source(reader))
                # What a member has left out is lost with its memory, and counts as nothing learned.
                self.sources.append(without_progress(job) if left_out else source)
            if not store.near:
                self._announce(batches, chunk_bytes)
            if job.terms.clip:
                self.clipping = Clipping(job, [read() for read in norms])
                self.sources = [*map(self.clipping.clipped, range(len(members)), self.sources)]
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

    def _announce(self, batches: Iterable[Sequence[int]], chunk_bytes: int) -> None:
        for _, reader in self._readers:
            reader.announce_norms()
        for batch in batches:
            for block in blocks(self._job.layout, batch, chunk_bytes, self.block_bytes):
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
            self._received(self._job.layout.sent_bytes(piece, self._job.terms.codec))
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

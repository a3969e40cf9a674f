"""The contributions that the record of an elastic sync names, opened to be added up: each is read once, in the order of use."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from ..._arithmetic._clip import Clipping
from ..._arithmetic._reduction import blocks
from ..._arithmetic._sent import as_sent, sent_bytes
from ..._arithmetic._sharded import carries, with_unchanged
from ..._store._api import block_bytes_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import torch

    from ..._arithmetic._layout import Piece
    from ..._arithmetic._sharded import Source
    from .._life._life import Life
    from .._life._progress import Progress
    from .._records._delta import DeltaReader
    from .._records._records import Commit


class Inputs:
    """Contributions to some shards. Not thread-safe.

    Args:
        life: The life that reads them.
        progress: What the life holds of the fragment.
        commit: The record that names them.
        batches: The shards, in the order in which they are updated; those of a batch together.
        local: Whether this life's own contribution is taken from memory.

    Attributes:
        sources: For every member, in rank order, a source that gives its contribution chunk by chunk.
        block_bytes: How many bytes are read from one contribution before the next one is read.
        clipping: How contributions are clipped; None if they are not. The sources are clipped already.

    Raises:
        ObjectNotFoundError: A contribution is gone.
        CorruptedObjectError: A contribution does not have the size that it should have, or its norms are damaged.
    """

    def __init__(
        self,
        life: Life,
        progress: Progress,
        commit: Commit,
        batches: Sequence[Sequence[int]],
        *,
        local: bool,
    ) -> None:
        self._life = life
        self._layout = progress.job.layout
        self._codec = progress.job.terms.codec
        self._readers: list[tuple[int, DeltaReader]] = []
        self._stack = ExitStack()
        self.sources: list[Source] = []
        self.block_bytes = block_bytes_of(life.store.store) // (2 if life.gather else 1)
        self.clipping: Clipping | None = None
        shards = [shard for batch in batches for shard in batch]
        norms: list[Callable[[], Sequence[float]]] = []
        try:
            for member in commit.members:
                if local and (member.rank, member.epoch) == (life.rank, life.epoch):
                    self.sources.append(as_sent(progress.job))
                    norms.append(lambda: progress.job.contribution.norms)
                    continue
                # The size is known, since a contribution of another size would not be valid.
                size = progress.format.size(member.groups)
                opened = self._stack.enter_context(life.store.store.open(member.key, size))
                reader = progress.format.reader(member, opened, shards, life.origin(member.key))
                self._readers.append((member.groups, reader))
                norms.append(reader.norms)
                self.sources.append(
                    with_unchanged(progress.job, member.groups, self._source(reader))
                )
            if not life.store.near:
                self._announce(batches)
            if progress.job.terms.clip:
                self.clipping = Clipping(progress.job, [read() for read in norms])
                self.sources = [
                    self.clipping.clipped(number, source)
                    for number, source in enumerate(self.sources)
                ]
        except BaseException:
            self.close()
            raise

    def verify(self, shards: Iterable[int]) -> None:
        """Verify the checksums of these shards, which have been read.

        Raises:
            CorruptedObjectError: What was read is not what was written.
        """
        for shard in shards:
            for _, reader in self._readers:
                reader.verify(shard)

    def close(self) -> None:
        """Close all contributions; repeatable."""
        self._stack.close()

    def _announce(self, batches: Iterable[Sequence[int]]) -> None:
        for _, reader in self._readers:
            reader.announce_norms()
        for batch in batches:
            for block in blocks(self._layout, batch, self._life.chunk_bytes, self.block_bytes):
                sizes: dict[int, dict[int, int]] = {}
                for groups, reader in self._readers:
                    if groups not in sizes:
                        sizes[groups] = self._sizes(block, groups)
                    reader.announce(sizes[groups])

    def _source(self, reader: DeltaReader) -> Source:
        def read(piece: Piece, out: torch.Tensor) -> torch.Tensor:
            reader.read(out)
            self._life.traffic.received += sent_bytes(self._codec, self._layout, piece)
            return out

        return read

    def _sizes(self, block: Iterable[tuple[int, Piece]], groups: int) -> dict[int, int]:
        """For every shard in a block, the bytes of the groups that a contribution carries."""
        sizes: dict[int, int] = {}
        for shard, piece in block:
            size = sent_bytes(self._codec, self._layout, piece)
            sizes[shard] = sizes.get(shard, 0) + (size if carries(groups, piece.group) else 0)
        return sizes

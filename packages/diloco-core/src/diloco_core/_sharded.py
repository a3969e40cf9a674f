"""The arithmetic that every sharded exchange shares: contribute, reduce in rank order, update, adopt."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeAlias

import torch

from ._errors import NonFiniteDeltaError
from ._layout import Layout, Piece, Rule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ._exchange import SyncJob

    # Fills the buffer with a rank's contribution to a chunk and returns it, or returns a view that holds it already.
    Source: TypeAlias = Callable[[Piece, torch.Tensor], torch.Tensor]


class Scratch:
    """Two chunk-sized buffers, reused for every chunk. Not thread-safe."""

    def __init__(self, chunk_bytes: int) -> None:
        size = -(-max(chunk_bytes, 8) // 8) * 8
        self._buffers = [torch.empty(size, dtype=torch.uint8, device="cpu") for _ in range(2)]

    def tensor(self, which: int, layout: Layout, piece: Piece) -> torch.Tensor:
        """Buffer 0 or 1 as a tensor that fits ``piece``."""
        return self._buffers[which].view(layout.groups[piece.group].dtype)[: piece.numel]


def sent_pieces(layout: Layout, shard: int, rank: int) -> tuple[Piece, ...]:
    """The pieces of a shard that ``rank`` contributes to."""
    return tuple(p for p in layout.shard(shard) if rank == 0 or layout.groups[p.group].rule is not Rule.FIRST)


def contributions(
    job: SyncJob, shard: int, rank: int, chunk_bytes: int, scratch: Scratch, *, everything: bool = False
) -> Iterator[torch.Tensor]:
    """The own contribution to a shard, chunk by chunk, each checked to be finite.

    ``everything``: also what only the first member's values are taken of, since anybody may turn out to be the first.

    Raises:
        NonFiniteDeltaError: A chunk holds NaN or infinity.
    """
    layout = job.layout
    for chunk in layout.chunks(shard, chunk_bytes):
        if rank != 0 and not everything and layout.groups[chunk.group].rule is Rule.FIRST:
            continue
        values = job.contribution(chunk, scratch.tensor(0, layout, chunk))
        _check_finite(job, chunk, values, rank)
        yield values


def reduce_shard(
    job: SyncJob,
    shard: int,
    sources: Sequence[Source],
    chunk_bytes: int,
    scratch: Scratch,
    *,
    everything: bool = False,
) -> None:
    """Sum a shard's contributions in rank order, update the own copy and adopt the new values.

    Args:
        job: The sync.
        shard: Which shard.
        sources: For every rank, in order, what gives its contribution to a chunk. Chunks come in file order.
        chunk_bytes: Largest size of a chunk.
        scratch: Buffers.
        everything: Whether the sources give also what only the first one's values are taken of.
    """
    layout = job.layout
    for chunk in layout.chunks(shard, chunk_bytes):
        buffer = scratch.tensor(0, layout, chunk)
        total = sources[0](chunk, buffer)
        if layout.groups[chunk.group].rule is not Rule.FIRST:
            for source in sources[1:]:
                total = torch.add(total, source(chunk, scratch.tensor(1, layout, chunk)), out=buffer)
            if len(sources) > 1:
                total.div_(len(sources))
        elif everything:
            for source in sources[1:]:  # it is read, so that its section can be verified
                source(chunk, scratch.tensor(1, layout, chunk))
        job.adopt(chunk, job.update(chunk, total))


def adopt_shard(job: SyncJob, shard: int, read: Source, chunk_bytes: int, scratch: Scratch) -> None:
    """Read a published shard chunk by chunk and adopt it."""
    for chunk in job.layout.chunks(shard, chunk_bytes):
        values = job.destination(chunk)
        if values is None:
            values = scratch.tensor(0, job.layout, chunk)
        read(chunk, values)
        job.adopt(chunk, values)


def _check_finite(job: SyncJob, chunk: Piece, values: torch.Tensor, rank: int) -> None:
    # The sum of finite values can overflow, but NaN or infinity always shows in it; and it costs a fifth of isfinite().
    if not values.is_floating_point() or math.isfinite(values.sum().item()):
        return
    finite = values.isfinite()
    if not bool(finite.all()):
        index = int(finite.logical_not().nonzero()[0].item())
        raise NonFiniteDeltaError(job.locate(chunk, index), rank)

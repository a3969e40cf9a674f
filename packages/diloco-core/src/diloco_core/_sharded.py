"""The arithmetic that every sharded exchange shares: contribute, reduce in rank order, update, adopt."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeAlias

import torch

from ._errors import NonFiniteDeltaError, NonFiniteUpdateError
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


def carried_groups(job: SyncJob) -> int:
    """Which groups the contribution to a sync has to carry, as bits: all but those that have not changed.

    Who reads it takes the values of the others from its own global copy, which is the same at all replicas.
    """
    unchanged = job.unchanged()
    return sum(1 << group for group in range(len(job.layout.groups)) if group not in unchanged)


def carries(groups: int, group: int) -> bool:
    """Whether a contribution of such groups carries a group."""
    return bool(groups >> group & 1)


def may_carry(layout: Layout, groups: int) -> bool:
    """Whether a contribution may carry these groups: none that is unknown, and everything that takes an outer step."""
    known = groups >> len(layout.groups) == 0
    return known and all(carries(groups, g) for g, group in enumerate(layout.groups) if group.rule is Rule.OUTER)


def sent_pieces(layout: Layout, shard: int, rank: int, groups: int) -> tuple[Piece, ...]:
    """The pieces of a shard that ``rank`` sends, of the groups that its contribution carries."""
    return tuple(
        p
        for p in layout.shard(shard)
        if carries(groups, p.group) and (rank == 0 or layout.groups[p.group].rule is not Rule.FIRST)
    )


def contributions(
    job: SyncJob,
    shard: int,
    rank: int,
    chunk_bytes: int,
    scratch: Scratch,
    *,
    everything: bool = False,
    groups: int | None = None,
) -> Iterator[torch.Tensor]:
    """The own contribution to a shard, chunk by chunk, each checked: what takes an outer step has to be finite.

    ``everything``: also what only the first member's values are taken of, since anybody may turn out to be the first.
    ``groups``: only these groups, as bits.

    Raises:
        NonFiniteDeltaError: A chunk holds NaN or infinity, or a buffer NaN where there was none before.
    """
    layout = job.layout
    for chunk in layout.chunks(shard, chunk_bytes):
        if rank != 0 and not everything and layout.groups[chunk.group].rule is Rule.FIRST:
            continue
        if groups is not None and not carries(groups, chunk.group):
            continue
        values = job.contribution(chunk, scratch.tensor(0, layout, chunk))
        if job.must_be_finite(chunk):
            _check_finite(job, chunk, values, rank)
        else:
            _check_buffers(job, chunk, values, rank)
        yield values


def reduce_shard(
    job: SyncJob,
    shard: int,
    sources: Sequence[Source],
    chunk_bytes: int,
    scratch: Scratch,
    *,
    sync: int,
    everything: bool = False,
    verify: Callable[[], None] = lambda: None,
) -> None:
    """Sum a shard's contributions in rank order, update the own copy and adopt the new values.

    Args:
        job: The sync.
        shard: Which shard.
        sources: For every rank, in order, what gives its contribution to a chunk. Chunks come in file order.
        chunk_bytes: Largest size of a chunk.
        scratch: Buffers.
        sync: Number of the sync, for errors.
        everything: Whether the sources give also what only the first one's values are taken of.
        verify: Called when all contributions have been read; raises if they are not what was written.

    Raises:
        NonFiniteUpdateError: The new values would be NaN or infinite. The own copy is undefined then.
    """
    layout = job.layout
    refused: NonFiniteUpdateError | None = None
    for chunk in layout.chunks(shard, chunk_bytes):
        try:
            if layout.groups[chunk.group].rule is not Rule.FIRST:
                total = mean(job, chunk, sources, scratch, sync)
            else:
                total = sources[0](chunk, scratch.tensor(0, layout, chunk))
                for source in sources[1:] if everything else ():  # it is read, so that its section can be verified
                    source(chunk, scratch.tensor(1, layout, chunk))
            values = job.update(chunk, total)
            job.check_update(chunk, values, sync)
        except NonFiniteUpdateError as error:
            # Perhaps a contribution was damaged on its way. Checksums stand at its end, so all of it is read before anybody
            # blames the outer step.
            refused = refused or error
            continue
        job.adopt(chunk, values)
    verify()
    if refused is not None:
        raise refused


def mean(job: SyncJob, chunk: Piece, sources: Sequence[Source], scratch: Scratch, sync: int) -> torch.Tensor:
    """The mean of all contributions to a chunk, summed in rank order.

    Args:
        job: The sync.
        chunk: The chunk.
        sources: For every rank, in order, what gives its contribution.
        scratch: Buffers; the first one may hold the result.
        sync: Number of the sync, for errors.

    Raises:
        NonFiniteUpdateError: The mean of a buffer is not finite, although the contributions are.
    """
    if len(sources) > 1 and not job.must_be_finite(chunk):
        return _mean_of_buffers(job, chunk, sources, scratch, sync)
    buffer = scratch.tensor(0, job.layout, chunk)
    total = sources[0](chunk, buffer)
    for source in sources[1:]:
        total = torch.add(total, source(chunk, scratch.tensor(1, job.layout, chunk)), out=buffer)
    return total.div_(len(sources)) if len(sources) > 1 else total


def _mean_of_buffers(
    job: SyncJob, chunk: Piece, sources: Sequence[Source], scratch: Scratch, sync: int
) -> torch.Tensor:
    """The mean, and exactly the common value where all replicas have the same one.

    A causal mask of -inf, or a table that nobody changes, comes out as it went in: neither rounding nor overflow of the sum
    may touch it. Buffers are small beside the parameters, so this may cost a few more passes.
    """
    first = sources[0](chunk, scratch.tensor(0, job.layout, chunk)).clone()
    total, same = first.clone(), torch.ones(chunk.numel, dtype=torch.bool, device="cpu")
    infinite, nan = first.isinf(), first.isnan()
    for source in sources[1:]:
        values = source(chunk, scratch.tensor(1, job.layout, chunk))
        same &= _bits(values) == _bits(first)
        infinite |= values.isinf()
        nan |= values.isnan()
        total += values
    total = torch.where(same, first, total.div_(len(sources)))
    # Infinity out of finite values is an overflow of the sum, and NaN without NaN comes of infinities that differ.
    made = (total.isinf() & ~infinite) | (total.isnan() & ~nan)
    if bool(made.any()):
        raise NonFiniteUpdateError(job.locate(chunk, _first(made)), total.dtype, sync)
    return total


def with_unchanged(job: SyncJob, groups: int, source: Source) -> Source:
    """A source of a contribution that carries these groups; what it does not carry is as in the global copy."""

    def read(piece: Piece, out: torch.Tensor) -> torch.Tensor:
        if carries(groups, piece.group):
            return source(piece, out)
        copy = job.destination(piece)
        assert copy is not None  # what has no global copy is never unchanged
        return out.copy_(copy)

    return read


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
        raise NonFiniteDeltaError(job.locate(chunk, _first(~finite)), rank)


def _check_buffers(job: SyncJob, chunk: Piece, values: torch.Tensor, rank: int) -> None:
    """Infinity may be meant (masks, the start of a running minimum); NaN is refused unless all replicas hold it already."""
    if not values.is_floating_point():
        return
    nan = _is_nan(values)
    before = job.destination(chunk)
    if bool(nan.any()) and before is not None:
        nan &= ~_is_nan(before)
    if bool(nan.any()):
        raise NonFiniteDeltaError(job.locate(chunk, _first(nan)), rank)


def _is_nan(values: torch.Tensor) -> torch.Tensor:
    return (values if values.dtype.itemsize > 1 else values.float()).isnan()  # torch cannot tell it of eight bits


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int64 if values.dtype.itemsize == torch.int64.itemsize else torch.int32)


def _first(found: torch.Tensor) -> int:
    """Index of the first element that is true."""
    return int(found.nonzero()[0].item())

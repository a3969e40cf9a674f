"""Add up contributions in rank order, and update this replica's copy with their mean.

The work is done block by block: all chunks of a block are read from one contribution, then from the
next one. Where requests cost nothing, a block is one chunk, which stays in the processor's cache.
Over a network, a block is as much as one request reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from .._codecs._codec import is_sparse
from .._errors import NonFiniteUpdateError
from ._layout import Layout, Piece, Rule
from ._sharded import Scratch, Source
from ._sync_job import SyncJob


def blocks(
    layout: Layout, shards: Iterable[int], chunk_bytes: int, block_bytes: int
) -> Iterator[list[tuple[int, Piece]]]:
    """Yield the chunks of some shards in blocks of at most ``block_bytes``, or of a single chunk.

    Each chunk comes with the number of its shard.
    """
    block: list[tuple[int, Piece]] = []
    size = 0
    for shard in shards:
        for chunk in layout.chunks(shard, chunk_bytes):
            chunk_size = layout.piece_bytes(chunk)
            if block and size + chunk_size > block_bytes:
                yield block
                block, size = [], 0
            block.append((shard, chunk))
            size += chunk_size
    if block:
        yield block


def reduce_shards(
    job: SyncJob,
    shards: Iterable[int],
    sources: Sequence[Source],
    chunk_bytes: int,
    scratch: Scratch,
    *,
    sync: int,
    block_bytes: int = 0,
    verify: Callable[[], None] = lambda: None,
    shares: Sequence[float] = (),
) -> None:
    """Sum contributions to shards in rank order, update this replica's copy, and adopt the result.

    Args:
        job: The sync.
        shards: The shards to reduce.
        sources: For every rank, in order, the source of its contribution. They are asked for chunks
            in file order.
        chunk_bytes: Largest size of a chunk.
        scratch: Buffers.
        sync: Number of the sync, for errors.
        block_bytes: How much is read from one source before the next one: at least one chunk.
        verify: Called after all contributions have been read; raises if they are not what was
            written.
        shares: For every rank, in order, what its contribution is multiplied by; empty if all count
            the same.

    Raises:
        NonFiniteUpdateError: The new values would be NaN or infinite. This replica's copy is
            undefined then.
    """
    refused: NonFiniteUpdateError | None = None
    for block in blocks(job.layout, shards, chunk_bytes, block_bytes):
        chunks = [chunk for _, chunk in block]
        means = [
            _mean_of(job, chunk, out, scratch, len(sources), shares)
            for chunk, out in zip(chunks, scratch.totals(job.layout, chunks), strict=True)
        ]
        for source in sources:
            for chunk_mean in means:
                chunk_mean.add(source)
        for chunk, chunk_mean in zip(chunks, means, strict=True):
            try:
                values = job.update(chunk, chunk_mean.result(sync))
                job.check_update(chunk, values, sync)
            except NonFiniteUpdateError as error:
                # A contribution may have been damaged on its way. Its checksum follows its values,
                # so read and verify all of it before blaming the outer step.
                refused = refused or error
                continue
            job.adopt(chunk, values)
    verify()
    if refused is not None:
        raise refused


def mean(
    job: SyncJob,
    chunk: Piece,
    sources: Sequence[Source],
    scratch: Scratch,
    sync: int,
    shares: Sequence[float] = (),
) -> torch.Tensor:
    """The mean of all contributions to a chunk, summed in rank order.

    Args:
        job: The sync.
        chunk: The chunk.
        sources: For every rank, in order, the source of its contribution.
        scratch: Buffers; the first one may hold the result.
        sync: Number of the sync, for errors.
        shares: For every rank, in order, what its contribution is multiplied by; empty if all count
            the same.

    Raises:
        NonFiniteUpdateError: The mean of a buffer is not finite, although the contributions are.
    """
    (out,) = scratch.totals(job.layout, [chunk])
    chunk_mean = _mean_of(job, chunk, out, scratch, len(sources), shares)
    for source in sources:
        chunk_mean.add(source)
    return chunk_mean.result(sync)


@dataclass
class _Mean:
    """The mean of the contributions to a chunk."""

    job: SyncJob
    chunk: Piece
    out: torch.Tensor
    scratch: Scratch
    members: int  # how many contributions will be added
    shares: Sequence[float] = ()  # of the members, in rank order; empty if all count the same
    count: int = 0
    total: torch.Tensor | None = None

    def add(self, source: Source) -> None:
        """Add the next contribution, in rank order."""
        self._take(source(self.chunk, self._buffer()))
        self.count += 1

    def _buffer(self) -> torch.Tensor:
        """Memory for the values of the next contribution: for the first one, that of the result."""
        return self.scratch.tensor(1, self.job.layout, self.chunk) if self.count else self.out

    def _take(self, values: torch.Tensor) -> None:
        """Add values, which may be a view of memory that must not change."""
        self.total = values if self.total is None else torch.add(self.total, values, out=self.out)

    def result(self, sync: int) -> torch.Tensor:  # noqa: ARG002 - a subclass needs it
        """The mean; with shares, the sum."""
        assert self.total is not None
        return self.total.div_(self.count) if self.count > 1 and not self.shares else self.total


class _WeightedMean(_Mean):
    """The sum of the contributions to a chunk, each multiplied by its share."""

    def _take(self, values: torch.Tensor) -> None:
        # Not torch.add(alpha=...), which rounds once or twice, depending on the processor.
        super()._take(torch.mul(values, self.shares[self.count], out=self._buffer()))


@dataclass
class _TrimmedMean(_Mean):
    """The mean of the contributions to a chunk without the extreme values of each element.

    In every element, the ``trim`` largest and the ``trim`` smallest values are left out. It needs
    memory for a chunk of every contribution.
    """

    def __post_init__(self) -> None:
        shape = self.members, self.chunk.numel
        self._values = torch.empty(shape, dtype=self.out.dtype, device="cpu")

    def _take(self, values: torch.Tensor) -> None:
        self._values[self.count].copy_(values)

    def result(self, sync: int) -> torch.Tensor:  # noqa: ARG002 - a subclass needs it
        """The trimmed mean."""
        rows, last, trim = list(self._values), self.count - 1, self.job.terms.trim
        # Moves the extremes to the ends, as a bubble sort does. A sort along this dimension takes
        # many times as long.
        for end in range(trim):
            for low in range(end, last - end):
                _put_in_order(rows[low], rows[low + 1])
            for low in reversed(range(end, last - end - 1)):
                _put_in_order(rows[low], rows[low + 1])
        # Beginning with 0, so that the sign of a zero does not depend on which of two equal values
        # was moved.
        self.out.zero_()
        for row in rows[trim : self.count - trim]:
            self.out.add_(row)
        return self.out.div_(self.count - 2 * trim)


def _put_in_order(low: torch.Tensor, high: torch.Tensor) -> None:
    """In every element, put the smaller value into ``low`` and the larger one into ``high``."""
    smaller = torch.minimum(low, high)
    torch.maximum(low, high, out=high)
    low.copy_(smaller)


@dataclass
class _MeanOfSent(_Mean):
    """For each element the mean of those contributions that hold it.

    A sparse codec sends few, and the others decode to zero.

    So that elements that few replicas have chosen move as far as others (SparseLoCo, arXiv
    2508.15706). With shares, it is their weighted mean.
    """

    def __post_init__(self) -> None:
        self._sent = torch.zeros_like(self.out)  # the shares of those who sent an element

    def _take(self, values: torch.Tensor) -> None:
        share = self.shares[self.count] if self.shares else 1.0
        self._sent += (values != 0).to(values.dtype).mul_(share)
        super()._take(values if share == 1.0 else values * share)

    def result(self, sync: int) -> torch.Tensor:  # noqa: ARG002 - a subclass needs it
        """The mean."""
        assert self.total is not None
        return self.total.div_(self._sent.masked_fill_(self._sent == 0, 1.0))


class _First(_Mean):
    """The first contribution to a chunk. The others are read, so that they can be verified."""

    def _take(self, values: torch.Tensor) -> None:
        self.total = values if self.total is None else self.total

    def result(self, sync: int) -> torch.Tensor:  # noqa: ARG002 - a subclass needs it
        """Return the first contribution."""
        assert self.total is not None
        return self.total


class _MeanOfBuffers(_Mean):
    """The mean of the contributions to a chunk of buffers.

    Elements that are equal on all replicas keep exactly their value.

    A causal mask of -inf, or a table that never changes, comes out as it went in: neither rounding
    nor overflow of the sum may alter it. Buffers are small compared with the parameters, so a few
    additional passes are affordable.
    """

    def _take(self, values: torch.Tensor) -> None:
        if self.total is None:
            self._first, self.total = values.clone(), values.clone()
            self._same = torch.ones(self.chunk.numel, dtype=torch.bool, device="cpu")
            self._infinite, self._nan = self._first.isinf(), self._first.isnan()
            return
        self._same &= _bits(values) == _bits(self._first)
        self._infinite |= values.isinf()
        self._nan |= values.isnan()
        self.total += values

    def result(self, sync: int) -> torch.Tensor:
        """The mean.

        Raises:
            NonFiniteUpdateError: The mean is not finite, although the contributions are.
        """
        assert self.total is not None
        total = torch.where(self._same, self._first, self.total.div_(self.count))
        # Infinity from finite values is an overflow of the sum; NaN from values without NaN comes
        # from opposite infinities.
        newly_not_finite = (total.isinf() & ~self._infinite) | (total.isnan() & ~self._nan)
        if bool(newly_not_finite.any()):
            index = int(newly_not_finite.nonzero()[0].item())
            raise NonFiniteUpdateError(self.job.locate(self.chunk, index), total.dtype, sync)
        return total


def _mean_of(
    job: SyncJob,
    chunk: Piece,
    out: torch.Tensor,
    scratch: Scratch,
    count: int,
    shares: Sequence[float],
) -> _Mean:
    rule = job.layout.groups[chunk.group].rule
    # Weights say how much was learned, and so do extremes. Buffers were not learned, so their mean
    # has none of that.
    if rule is not Rule.OUTER:
        shares = ()
    kind: type[_Mean]
    if rule is Rule.FIRST:
        kind = _First
    elif rule is Rule.OUTER and job.terms.trim:
        kind = _TrimmedMean
    elif rule is Rule.OUTER and is_sparse(job.terms.codec):
        kind = _MeanOfSent
    elif shares:
        kind = _WeightedMean
    else:
        kind = _Mean if count == 1 or job.must_be_finite(chunk) else _MeanOfBuffers
    return kind(job, chunk, out, scratch, count, shares)


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(
        torch.int64 if values.dtype.itemsize == torch.int64.itemsize else torch.int32
    )

"""Adding up contributions in rank order, and updating the own copy with their mean.

It goes block by block: of every contribution in turn, all chunks of a block are read before those of the next contribution.
Where requests cost nothing a block is one chunk, which stays in the processor's cache. Over a network a block is what one
request brings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .._errors import NonFiniteUpdateError
from ._layout import Rule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from ._layout import Layout, Piece
    from ._sharded import Scratch, Source
    from ._sync_job import SyncJob


def blocks(
    layout: Layout, shards: Iterable[int], chunk_bytes: int, block_bytes: int
) -> Iterator[list[tuple[int, Piece]]]:
    """The chunks of some shards, each with its shard, in groups of at most ``block_bytes`` (but at least one chunk)."""
    block: list[tuple[int, Piece]] = []
    size = 0
    for shard in shards:
        for chunk in layout.chunks(shard, chunk_bytes):
            more = layout.piece_bytes(chunk)
            if block and size + more > block_bytes:
                yield block
                block, size = [], 0
            block.append((shard, chunk))
            size += more
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
    everything: bool = False,
    verify: Callable[[], None] = lambda: None,
) -> None:
    """Sum the contributions to shards in rank order, update the own copy and adopt the new values.

    Args:
        job: The sync.
        shards: Which shards.
        sources: For every rank, in order, what gives its contribution to a chunk. Chunks come in file order.
        chunk_bytes: Largest size of a chunk.
        scratch: Buffers.
        sync: Number of the sync, for errors.
        block_bytes: How much is taken of one source before the next one's turn: one chunk at least.
        everything: Whether the sources give also what only the first one's values are taken of.
        verify: Called when all contributions have been read; raises if they are not what was written.

    Raises:
        NonFiniteUpdateError: The new values would be NaN or infinite. The own copy is undefined then.
    """
    refused: NonFiniteUpdateError | None = None
    for block in blocks(job.layout, shards, chunk_bytes, block_bytes):
        chunks = [chunk for _, chunk in block]
        means = [
            _mean_of(job, chunk, out, scratch, len(sources), everything=everything)
            for chunk, out in zip(chunks, scratch.totals(job.layout, chunks), strict=True)
        ]
        for source in sources:
            for each in means:
                each.add(source)
        for chunk, each in zip(chunks, means, strict=True):
            try:
                values = job.update(chunk, each.result(sync))
                job.check_update(chunk, values, sync)
            except NonFiniteUpdateError as error:
                # Perhaps a contribution was damaged on its way. Checksums stand at its end, so all of it is read before
                # anybody blames the outer step.
                refused = refused or error
                continue
            job.adopt(chunk, values)
    verify()
    if refused is not None:
        raise refused


def mean(
    job: SyncJob, chunk: Piece, sources: Sequence[Source], scratch: Scratch, sync: int
) -> torch.Tensor:
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
    (out,) = scratch.totals(job.layout, [chunk])
    each = (
        _Mean(job, chunk, out, scratch)
        if _is_plain(job, chunk, len(sources))
        else _MeanOfBuffers(job, chunk, out, scratch)
    )
    for source in sources:
        each.add(source)
    return each.result(sync)


class _Mean:
    """The mean of the contributions to a chunk."""

    def __init__(self, job: SyncJob, chunk: Piece, out: torch.Tensor, scratch: Scratch) -> None:
        self._job = job
        self._chunk = chunk
        self._out = out
        self._scratch = scratch
        self._count = 0
        self._total: torch.Tensor | None = None

    def add(self, source: Source) -> None:
        """The next contribution, in rank order."""
        self._count += 1
        if self._total is None:
            self._total = source(self._chunk, self._out)
        else:
            self._total = torch.add(self._total, self._next(source), out=self._out)

    def result(self, sync: int) -> torch.Tensor:  # noqa: ARG002 - others have something to say
        """The mean."""
        assert self._total is not None
        return self._total.div_(self._count) if self._count > 1 else self._total

    def _next(self, source: Source) -> torch.Tensor:
        return source(self._chunk, self._scratch.tensor(1, self._job.layout, self._chunk))


class _First(_Mean):
    """The first contribution to a chunk. ``everything``: the others are read, so that their sections can be verified."""

    def __init__(
        self, job: SyncJob, chunk: Piece, out: torch.Tensor, scratch: Scratch, *, everything: bool
    ) -> None:
        super().__init__(job, chunk, out, scratch)
        self._everything = everything

    def add(self, source: Source) -> None:
        """The next contribution, in rank order."""
        if self._total is None:
            self._total = source(self._chunk, self._out)
        elif self._everything:
            self._next(source)

    def result(self, sync: int) -> torch.Tensor:  # noqa: ARG002 - others have something to say
        """The first one."""
        assert self._total is not None
        return self._total


class _MeanOfBuffers(_Mean):
    """The mean, and exactly the common value where all replicas have the same one.

    A causal mask of -inf, or a table that nobody changes, comes out as it went in: neither rounding nor overflow of the sum
    may touch it. Buffers are small beside the parameters, so this may cost a few more passes.
    """

    def add(self, source: Source) -> None:
        """The next contribution, in rank order."""
        self._count += 1
        if self._total is None:
            self._first = source(self._chunk, self._out).clone()
            self._total = self._first.clone()
            self._same = torch.ones(self._chunk.numel, dtype=torch.bool, device="cpu")
            self._infinite, self._nan = self._first.isinf(), self._first.isnan()
            return
        values = self._next(source)
        self._same &= _bits(values) == _bits(self._first)
        self._infinite |= values.isinf()
        self._nan |= values.isnan()
        self._total += values

    def result(self, sync: int) -> torch.Tensor:
        """The mean.

        Raises:
            NonFiniteUpdateError: It is not finite, although the contributions are.
        """
        assert self._total is not None
        total = torch.where(self._same, self._first, self._total.div_(self._count))
        # Infinity out of finite values is an overflow of the sum, and NaN without NaN comes of infinities that differ.
        made = (total.isinf() & ~self._infinite) | (total.isnan() & ~self._nan)
        if bool(made.any()):
            index = int(made.nonzero()[0].item())
            raise NonFiniteUpdateError(self._job.locate(self._chunk, index), total.dtype, sync)
        return total


def _mean_of(
    job: SyncJob, chunk: Piece, out: torch.Tensor, scratch: Scratch, count: int, *, everything: bool
) -> _Mean:
    if job.layout.groups[chunk.group].rule is Rule.FIRST:
        return _First(job, chunk, out, scratch, everything=everything)
    return (_Mean if _is_plain(job, chunk, count) else _MeanOfBuffers)(job, chunk, out, scratch)


def _is_plain(job: SyncJob, chunk: Piece, count: int) -> bool:
    return count == 1 or job.must_be_finite(chunk)


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(
        torch.int64 if values.dtype.itemsize == torch.int64.itemsize else torch.int32
    )

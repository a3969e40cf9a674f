"""The arithmetic that every sharded exchange shares: contributing and adopting.

:mod:`._reduction` has what lies between them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import TypeAlias

import torch

from .._errors import NonFiniteDeltaError
from .._squares import not_finite
from ._layout import Layout, Piece, Rule
from ._sync_job import SyncJob

# Fills the buffer with a rank's contribution to a chunk and returns the buffer; or returns a view
# that already holds it.
Source: TypeAlias = Callable[[Piece, torch.Tensor], torch.Tensor]


# Bytes; parts of a buffer begin at multiples of it, so that they are aligned as whole tensors are
_WORD = 64


class Scratch:
    """Two chunk-sized buffers, reused for every chunk.

    They grow to what is needed. Not thread-safe.
    """

    def __init__(self, chunk_bytes: int) -> None:
        self._buffers = [_bytes(max(chunk_bytes, _WORD)) for _ in range(2)]

    def tensor(self, which: int, layout: Layout, piece: Piece) -> torch.Tensor:
        """Buffer 0 or 1 as a tensor that fits ``piece``."""
        dtype = layout.groups[piece.group].dtype
        return self._buffer(which, layout.piece_bytes(piece)).view(dtype)[: piece.numel]

    def totals(self, layout: Layout, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        """Parts of the first buffer as tensors that fit these pieces, side by side."""
        starts = [0, *accumulate(_rounded(layout.piece_bytes(piece)) for piece in pieces)]
        buffer = self._buffer(0, starts[-1])
        return [
            buffer[start:stop].view(layout.groups[piece.group].dtype)[: piece.numel]
            for (start, stop), piece in zip(pairwise(starts), pieces, strict=True)
        ]

    def _buffer(self, which: int, size: int) -> torch.Tensor:
        if size > self._buffers[which].numel():
            self._buffers[which] = _bytes(size)
        return self._buffers[which]


def _bytes(size: int) -> torch.Tensor:
    # A tensor that is made inside torch.inference_mode() could not be used outside of it.
    with torch.inference_mode(mode=False):
        return torch.empty(_rounded(size), dtype=torch.uint8, device="cpu")


def _rounded(size: int) -> int:
    return -(-size // _WORD) * _WORD


def carried_groups(job: SyncJob) -> int:
    """Return the groups that a contribution to a sync has to carry, as a bit mask.

    These are all except those that have not changed. A reader takes the values of the other groups
    from its own global copy, which is the same on all replicas.
    """
    unchanged = job.unchanged()
    return sum(1 << group for group in range(len(job.layout.groups)) if group not in unchanged)


def carries(groups: int, group: int) -> bool:
    """Say whether a contribution that carries ``groups`` (a bit mask) carries this group."""
    return bool(groups >> group & 1)


def may_carry(layout: Layout, groups: int) -> bool:
    """Say whether a contribution may carry exactly these groups.

    It may carry only groups of the layout, and must carry all that take an outer step.
    """
    known = groups >> len(layout.groups) == 0
    return known and all(
        carries(groups, g) for g, group in enumerate(layout.groups) if group.rule is Rule.OUTER
    )


def check_contribution(
    job: SyncJob, shard: int, rank: int, chunk_bytes: int, scratch: Scratch
) -> None:
    """Check a contribution to a shard that this replica does not send, before any replica changes.

    Raises:
        NonFiniteDeltaError: As for :func:`checked`.
    """
    for chunk in job.layout.chunks(shard, chunk_bytes):
        if rank == 0 or job.layout.groups[chunk.group].rule is not Rule.FIRST:
            checked(job, chunk, rank, scratch)


def checked(job: SyncJob, chunk: Piece, rank: int, scratch: Scratch) -> torch.Tensor:
    """Return this replica's contribution to a chunk, if it may be sent.

    Values that take an outer step must be finite.

    Raises:
        NonFiniteDeltaError: A chunk holds NaN or infinity, or a buffer holds NaN where there was
            none before.
    """
    values = job.contributed(chunk, scratch.tensor(0, job.layout, chunk))
    if job.must_be_finite(chunk):
        index = not_finite(values)
        if index is not None:
            raise NonFiniteDeltaError(job.locate(chunk, index), rank)
    else:
        _check_buffers(job, chunk, values, rank)
    return values


def as_sent(job: SyncJob) -> Source:
    """Return a source of this replica's contribution as all other replicas read it."""
    if job.terms.codec.plain:
        return job.contributed

    def read(piece: Piece, out: torch.Tensor) -> torch.Tensor:
        return decoded(job, piece, job.contributed(piece, out), out)

    return read


def decoded(job: SyncJob, piece: Piece, values: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Return what a contribution's values become when they are encoded and decoded.

    They are written into ``out``, unless that changes nothing.
    """
    codec = job.layout.codec_of(piece.group, job.terms.codec)
    if codec.plain:
        return values
    codec.decode(codec.encode(values), out)
    return out


def with_unchanged(job: SyncJob, groups: int, source: Source) -> Source:
    """A source of a contribution that carries ``groups``.

    Values of groups that it does not carry come from the global copy.
    """

    def read(piece: Piece, out: torch.Tensor) -> torch.Tensor:
        if carries(groups, piece.group):
            return source(piece, out)
        global_copy = job.destination(piece)
        assert global_copy is not None  # a group without a global copy never counts as unchanged
        return out.copy_(global_copy)

    return read


def without_progress(job: SyncJob) -> Source:
    """Return a source for the contribution of a replica that has learned nothing.

    It gives a pseudo-gradient of zero, and buffers as they were.
    """

    def read(piece: Piece, out: torch.Tensor) -> torch.Tensor:
        if job.layout.groups[piece.group].rule is Rule.OUTER:
            return out.zero_()
        global_copy = job.destination(piece)
        assert global_copy is not None  # only runs that keep a state have such contributions
        return out.copy_(global_copy)

    return read


def adopt_shard(job: SyncJob, shard: int, read: Source, chunk_bytes: int, scratch: Scratch) -> None:
    """Read a published shard chunk by chunk and adopt it."""
    for chunk in job.layout.chunks(shard, chunk_bytes):
        values = job.destination(chunk)
        if values is None:
            values = scratch.tensor(0, job.layout, chunk)
        read(chunk, values)
        job.adopt(chunk, values)


def _check_buffers(job: SyncJob, chunk: Piece, values: torch.Tensor, rank: int) -> None:
    """Refuse NaN, unless all replicas hold it already.

    Infinity may be intended (masks, the start of a running minimum).
    """
    if not values.is_floating_point():
        return
    nan = _is_nan(values)
    global_copy = job.destination(chunk)
    if bool(nan.any()) and global_copy is not None:
        nan &= ~_is_nan(global_copy)
    if bool(nan.any()):
        raise NonFiniteDeltaError(job.locate(chunk, int(nan.nonzero()[0].item())), rank)


def _is_nan(values: torch.Tensor) -> torch.Tensor:
    # torch has no isnan() for floating-point dtypes of eight bits.
    return (values if values.dtype.itemsize > 1 else values.float()).isnan()

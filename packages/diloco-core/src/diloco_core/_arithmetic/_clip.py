"""Scaling down contributions, before they are added up, where they are larger than most others.

For each tensor, m is the median of the norms that it has in the contributions to a sync (of an even
number, the lower one of the two in the middle). A contribution in which it has the norm n is
multiplied by ``min(1, m / n)`` there. So a replica that learned too much moves the model at most as
far as half of the others do, in the direction in which it learned.

A contribution whose norm is 0 has nothing to multiply. With a sparse codec it does not enter the
median either, since who sends nothing of a tensor does not enter its mean.

The norm is that of the whole tensor as all replicas read it, after decoding, in float64. Only the
contributor reads all of it: it records the norms beside its contribution, and whoever updates a
shard takes them from there. So the result does not depend on how the tensors are cut into shards.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from .._codecs._codec import is_sparse
from .._errors import NonFiniteDeltaError
from ._layout import CHUNK_BYTES, Piece, Rule
from ._sent import codec_of
from ._sharded import Scratch, Source, checked
from ._sync_job import SyncJob


class Clipped(NamedTuple):
    """How far the contribution of one replica to a sync was scaled down (``clip="median"``).

    Attributes:
        least: The smallest factor of all tensors: 1 if none was scaled down.
        most: The largest one.
        tensor: The name of the tensor with the smallest factor; empty if none was scaled down.
    """

    least: float
    most: float
    tensor: str


class _Tensors:
    """The tensors that take an outer step, and so have a norm, in the order of these norms."""

    def __init__(self, job: SyncJob) -> None:
        self._job = job
        self._starts: dict[int, list[int]] = {}  # by group; tensors without elements are left out
        self._stops: dict[int, list[int]] = {}
        self._first: dict[int, int] = {}  # for each group, the index of its first tensor
        self.count = 0
        for number, group in enumerate(job.layout.groups):
            if group.rule is Rule.OUTER:
                starts = sorted({start for start in job.starts(number) if start < group.numel})
                self._starts[number], self._stops[number] = starts, [*starts[1:], group.numel]
                self._first[number] = self.count
                self.count += len(starts)

    def parts(self, piece: Piece) -> Iterator[tuple[int, int, int]]:
        """Yield the index of each tensor with elements in a piece, and its place in the piece."""
        if piece.group not in self._starts:
            return
        starts, stops = self._starts[piece.group], self._stops[piece.group]
        number = bisect_right(starts, piece.start) - 1
        while number < len(starts) and starts[number] < piece.stop:
            start, stop = max(starts[number], piece.start), min(stops[number], piece.stop)
            yield self._first[piece.group] + number, start - piece.start, stop - piece.start
            number += 1

    def name(self, index: int) -> str:
        """The name of the tensor with this index."""
        for group, starts in self._starts.items():
            number = index - self._first[group]
            if 0 <= number < len(starts):
                return self._job.locate(Piece(group, starts[number], starts[number] + 1), 0)
        raise IndexError(index)


def norm_count(job: SyncJob) -> int:
    """Return how many norms a contribution to a sync has: 0 if contributions are not clipped."""
    return _Tensors(job).count if job.terms.clip else 0


def measure_norms(job: SyncJob, rank: int, scratch: Scratch) -> None:
    """Note in this replica's contribution the norms of its tensors, as other replicas read them.

    Does nothing without clipping.

    Raises:
        NonFiniteDeltaError: The contribution, or what it decodes to, holds NaN or infinity, or a
            norm is too large for float64.
    """
    if not job.terms.clip:
        return
    tensors, layout = _Tensors(job), job.layout
    squares = [0.0] * tensors.count
    for number, group in enumerate(layout.groups):
        if group.rule is not Rule.OUTER:
            continue
        # Pieces that begin where blocks of the codec do, and do not depend on the shards. So the
        # norms do not either.
        step = layout.chunk_elements(number, CHUNK_BYTES)
        for start in range(0, group.numel, step):
            piece = Piece(number, start, min(start + step, group.numel))
            values = _decoded(job, piece, rank, scratch).double()
            with np.errstate(over="ignore"):
                for index, begin, end in tensors.parts(piece):
                    # By numpy, since torch's sum depends on the number of threads.
                    squares[index] += float(np.add.reduce(np.square(values[begin:end].numpy())))
    for index, square in enumerate(squares):
        if not math.isfinite(square):
            raise NonFiniteDeltaError(tensors.name(index), rank)
    job.contribution = replace(job.contribution, norms=tuple(map(math.sqrt, squares)))


def _decoded(job: SyncJob, piece: Piece, rank: int, scratch: Scratch) -> torch.Tensor:
    values = checked(job, piece, rank, scratch)
    codec = codec_of(job.terms.codec, job.layout, piece.group)
    if codec.plain:
        return values
    decoded = torch.empty_like(values)
    codec.decode(codec.encode(values), decoded)
    return decoded


def factors(norms: Sequence[Sequence[float]], *, sparse: bool = False) -> list[tuple[float, ...]]:
    """Return what each contribution is multiplied by, tensor by tensor.

    Args:
        norms: For every contribution the norms of its tensors.
        sparse: Whether contributions hold few values. Those that hold nothing of a tensor then do
            not enter its median, as they do not enter its mean.
    """
    medians = [
        _lower_median([norm for norm in each if norm or not sparse])
        for each in zip(*norms, strict=True)
    ]
    return [
        tuple(
            min(1.0, median / norm) if norm else 1.0
            for norm, median in zip(each, medians, strict=True)
        )
        for each in norms
    ]


def _lower_median(norms: Sequence[float]) -> float:
    return sorted(norms)[(len(norms) - 1) // 2] if norms else 0.0


class Clipping:
    """Clips the contributions to one sync. Not thread-safe.

    Args:
        job: The sync.
        norms: For every contribution, in rank order, the norms of its tensors.
    """

    def __init__(self, job: SyncJob, norms: Sequence[Sequence[float]]) -> None:
        self._tensors = _Tensors(job)
        self._factors = factors(norms, sparse=is_sparse(job.terms.codec))

    def clipped(self, member: int, source: Source) -> Source:
        """A source of the clipped contribution of the member with this index."""
        own_factors = self._factors[member]
        if all(factor == 1.0 for factor in own_factors):
            return source

        def read(piece: Piece, out: torch.Tensor) -> torch.Tensor:
            values = source(piece, out)
            parts = [
                (start, stop, own_factors[index])
                for index, start, stop in self._tensors.parts(piece)
                if own_factors[index] != 1.0
            ]
            if parts and values.data_ptr() != out.data_ptr():
                values = out.copy_(values)  # it may be a view of memory that must not change
            for start, stop, factor in parts:
                values[start:stop].mul_(factor)
            return values

        return read

    def report(self) -> tuple[Clipped, ...]:
        """Return how far every contribution was scaled down, in rank order."""
        return tuple(map(self._of, self._factors))

    def _of(self, own_factors: Sequence[float]) -> Clipped:
        least, most = min(own_factors, default=1.0), max(own_factors, default=1.0)
        name = self._tensors.name(own_factors.index(least)) if least < 1 else ""
        return Clipped(least, most, name)

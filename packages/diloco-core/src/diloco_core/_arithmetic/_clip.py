"""Scaling down contributions, before they are added up, where they are larger than most others.

For each tensor, m is the median of the norms that it has in the contributions to a sync (of an even
number, the lower one of the two in the middle). A contribution in which it has the norm n is
multiplied by ``min(1, m / n)`` there. So a replica that learned too much moves the model at most as
far as half of the others do, in the direction in which it learned.

A contribution whose norm is 0 has nothing to multiply. With a sparse codec it does not enter the
median either, since who sends nothing of a tensor does not enter its mean.

The norm is that of the whole tensor as all replicas read it, after decoding, in float64. Only the
contributor reads all of it: it records the norms beside its contribution, and the replica that
updates a shard takes them from there. So the result does not depend on how the tensors are cut into
shards.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median_low
from typing import NamedTuple

import numpy as np
import torch

from .._codecs._codec import is_sparse
from .._errors import NonFiniteDeltaError
from ._layout import CHUNK_BYTES, Piece, Rule
from ._sharded import Scratch, Source, checked, decoded
from ._sync_job import SyncJob


class Clipped(NamedTuple):
    """Say how far the contribution of a replica was scaled down in a sync (``clip="median"``).

    Attributes:
        least: The smallest factor of all tensors: 1 if none was scaled down.
        most: The largest one.
        tensor: The name of the tensor with the smallest factor; empty if none was scaled down.
    """

    least: float
    most: float
    tensor: str


class _Tensors:
    """Find the tensors that take an outer step, and so have a norm, in the order of these norms.

    Tensors without elements are left out.
    """

    def __init__(self, job: SyncJob) -> None:
        self._job = job
        self._places: list[Piece] = []  # of the tensors, in ascending order
        for number, group in enumerate(job.layout.groups):
            if group.rule is Rule.OUTER:
                bounds = sorted({*job.starts(number), group.numel})
                self._places += [Piece(number, start, stop) for start, stop in pairwise(bounds)]
        self.count = len(self._places)

    def parts(self, piece: Piece) -> Iterator[tuple[int, int, int]]:
        """Yield the index of each tensor with elements in a piece, and its place in the piece."""
        first = bisect_right(self._places, (piece.group, piece.start, math.inf)) - 1
        for index in range(max(first, 0), self.count):
            place = self._places[index]
            if place.group != piece.group or place.start >= piece.stop:
                return
            start, stop = max(place.start, piece.start), min(place.stop, piece.stop)
            yield index, start - piece.start, stop - piece.start

    def name(self, index: int) -> str:
        """The name of the tensor with this index."""
        return self._job.locate(self._places[index], 0)


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
            values = checked(job, piece, rank, scratch)
            values = decoded(job, piece, values, scratch.tensor(1, layout, piece)).double()
            with np.errstate(over="ignore"):
                for index, begin, end in tensors.parts(piece):
                    # By numpy, since torch's sum depends on the number of threads.
                    squares[index] += float(np.add.reduce(np.square(values[begin:end].numpy())))
    for index, square in enumerate(squares):
        if not math.isfinite(square):
            raise NonFiniteDeltaError(tensors.name(index), rank)
    job.contribution = replace(job.contribution, norms=tuple(map(math.sqrt, squares)))


def factors(norms: Sequence[Sequence[float]], *, sparse: bool = False) -> list[tuple[float, ...]]:
    """Return what each contribution is multiplied by, tensor by tensor.

    Args:
        norms: For every contribution the norms of its tensors.
        sparse: Whether contributions hold few values. Those that hold nothing of a tensor then do
            not enter its median, as they do not enter its mean.
    """
    medians = [
        median_low([norm for norm in each if norm or not sparse] or [0.0])
        for each in zip(*norms, strict=True)
    ]
    return [
        tuple(
            min(1.0, median / norm) if norm else 1.0
            for norm, median in zip(each, medians, strict=True)
        )
        for each in norms
    ]


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

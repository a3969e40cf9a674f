"""How a sync's flat values are cut: into groups by dtype and rule, groups into shards, shards into chunks."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

import torch

CHUNK_BYTES = 2**20
"""Default size of a chunk in bytes: what fits into a processor's second-level cache, measured best at 256 KiB to 1 MiB."""

# Shard boundaries fall on multiples of this many elements, so that vector instructions and mapped reads stay aligned.
_ALIGNMENT = 16


class Rule(StrEnum):
    """What the owner of a shard does with the contributions of a group."""

    OUTER = "outer"
    """Mean in rank order, then the outer optimizer."""
    MEAN = "mean"
    """Mean in rank order."""
    FIRST = "first"
    """The values of rank 0; the other ranks send nothing."""


@dataclass(frozen=True, slots=True)
class Group:
    """One flat vector of a sync.

    Attributes:
        dtype: The dtype it is summed, stored and sent in.
        numel: Its number of elements.
        rule: How contributions become the new values.
    """

    dtype: torch.dtype
    numel: int
    rule: Rule


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements ``[start, stop)`` of the group with index ``group``."""

    group: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Layout:
    """The fixed plan of a sync: every replica derives the same one from the schema.

    Attributes:
        groups: The flat vectors, widest dtype first (so that every piece of a file is aligned to its dtype).
        shards: Number of shards; shard k is reduced and published by rank ``k % world_size``.
    """

    groups: tuple[Group, ...]
    shards: int

    def __post_init__(self) -> None:
        sizes = [group.dtype.itemsize for group in self.groups]
        if sizes != sorted(sizes, reverse=True):
            raise ValueError(f"groups must come widest dtype first, not with item sizes {sizes}")
        if self.shards < 1:
            raise ValueError(f"a layout needs at least one shard, not {self.shards}")

    def bound(self, group: int, shard: int) -> int:
        """First element of ``group`` that belongs to ``shard`` (or the end, for ``shard == shards``)."""
        numel = self.groups[group].numel
        if shard == self.shards:
            return numel
        return numel * shard // self.shards // _ALIGNMENT * _ALIGNMENT

    def shard(self, shard: int) -> tuple[Piece, ...]:
        """The pieces of a shard, one per group that has elements in it."""
        pieces = (
            Piece(g, self.bound(g, shard), self.bound(g, shard + 1))
            for g in range(len(self.groups))
        )
        return tuple(piece for piece in pieces if piece.numel)

    def chunks(self, shard: int, chunk_bytes: int) -> Iterator[Piece]:
        """The pieces of a shard again, cut so that none is larger than ``chunk_bytes``."""
        for piece in self.shard(shard):
            step = self.chunk_elements(piece.group, chunk_bytes)
            for start in range(piece.start, piece.stop, step):
                yield Piece(piece.group, start, min(start + step, piece.stop))

    def chunk_elements(self, group: int, chunk_bytes: int) -> int:
        """Elements of ``group`` in a chunk of at most ``chunk_bytes`` (at least one)."""
        elements = max(1, chunk_bytes // self.groups[group].dtype.itemsize)
        # Vectorised kernels round the end of a tensor that fills no vector differently: whole vectors make the numbers
        # independent of the chunk size, down to 16 elements.
        return elements if elements < _ALIGNMENT else elements // _ALIGNMENT * _ALIGNMENT

    def piece_bytes(self, piece: Piece) -> int:
        """Size of a piece in bytes."""
        return piece.numel * self.groups[piece.group].dtype.itemsize

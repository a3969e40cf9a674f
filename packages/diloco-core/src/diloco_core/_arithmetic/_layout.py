"""The division of a sync's values into groups by dtype and rule, into shards, and into chunks."""

import math
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple

import torch

from .._codecs._codec import Codec
from .._codecs._plain import PLAIN

CHUNK_BYTES = 2**20
"""Default size of a chunk in bytes.

It fits into a processor's second-level cache; 256 KiB to 1 MiB were measured to be best.
"""

SHARD_BYTES = 16 * 2**20
"""The most bytes of values in a shard.

With momentum, the shard's object is twice as large; obstore sends it in one request.
"""

# Times as many bytes: nothing is gained by writing several files at once, and each costs a
# millisecond
_IN_A_FOLDER = 4

# Shard boundaries fall on multiples of this many elements, so that vector instructions and mapped
# reads stay aligned.
_ALIGNMENT = 16


class Rule(StrEnum):
    """Say what the owner of a shard does with the contributions to a group."""

    OUTER = "outer"
    """Takes their mean, adding them up in rank order, and applies the outer optimizer to it."""
    MEAN = "mean"
    """Takes their mean, adding them up in rank order."""
    FIRST = "first"
    """Takes the values of rank 0; the other ranks send nothing."""


@dataclass(frozen=True, slots=True)
class Group:
    """One flat vector of a sync.

    Attributes:
        dtype: The dtype in which it is summed, stored and sent.
        numel: Its number of elements.
        rule: How contributions become new values.
    """

    dtype: torch.dtype
    numel: int
    rule: Rule


class Piece(NamedTuple):
    """Elements ``[start, stop)`` of the group with index ``group``.

    A tuple, since very many are made, compared and hashed.
    """

    group: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Layout:
    """The division of the values of a sync, which every replica derives alike from the schema.

    Attributes:
        groups: The flat vectors, those with the widest dtype first (so that every piece of a file
            is aligned to its dtype).
        shards: Number of shards; shard k is reduced and published by rank ``k % world_size``.
        block: The number of elements that the codec encodes together: shards and chunks are cut
            between such blocks.
    """

    groups: tuple[Group, ...]
    shards: int
    block: int = 1

    @property
    def _alignment(self) -> int:
        """Shards and chunks begin at multiples of this many elements."""
        return math.lcm(_ALIGNMENT, self.block)

    def bound(self, group: int, shard: int) -> int:
        """Return the index of the first element of ``group`` that belongs to ``shard``.

        For ``shard == shards``, it is the end of the group.
        """
        numel = self.groups[group].numel
        if shard == self.shards:
            return numel
        return numel * shard // self.shards // self._alignment * self._alignment

    # Every sync asks for these several times, and every layout of the same model is equal, so that
    # they share what is kept.
    @lru_cache(maxsize=1024)  # noqa: B019 - layouts are small
    def shard(self, shard: int) -> tuple[Piece, ...]:
        """The pieces of a shard, one per group that has elements in it."""
        pieces = (
            Piece(group, self.bound(group, shard), self.bound(group, shard + 1))
            for group in range(len(self.groups))
        )
        return tuple(piece for piece in pieces if piece.numel)

    @lru_cache(maxsize=1024)  # noqa: B019 - layouts are small
    def chunks(self, shard: int, chunk_bytes: int) -> tuple[Piece, ...]:
        """Return the pieces of a shard, divided into parts of at most ``chunk_bytes``.

        A part is larger if a block of the codec is.
        """
        chunks = []
        for piece in self.shard(shard):
            step = self.chunk_elements(piece.group, chunk_bytes)
            chunks += [
                Piece(piece.group, start, min(start + step, piece.stop))
                for start in range(piece.start, piece.stop, step)
            ]
        return tuple(chunks)

    def chunk_count(self, piece: Piece, chunk_bytes: int) -> int:
        """Into how many chunks a piece of a shard is divided."""
        return -(-piece.numel // self.chunk_elements(piece.group, chunk_bytes))

    def chunk_elements(self, group: int, chunk_bytes: int) -> int:
        """Return the number of elements of ``group`` in a chunk of at most ``chunk_bytes``.

        It is at least one element, or one block.
        """
        elements = max(1, chunk_bytes // self.groups[group].dtype.itemsize)
        if self.block > 1:
            return max(1, elements // self._alignment) * self._alignment
        # Vectorised kernels round the last elements of a tensor differently if these do not fill a
        # vector. Chunks of whole vectors give results that do not depend on the chunk size, as long
        # as it is at least 16 elements.
        return elements if elements < _ALIGNMENT else elements // _ALIGNMENT * _ALIGNMENT

    def codec_of(self, group: int, codec: Codec) -> Codec:
        """The codec with which a group is sent: only values that take an outer step are encoded."""
        return codec if self.groups[group].rule is Rule.OUTER else PLAIN

    def sent_bytes(self, piece: Piece, codec: Codec) -> int:
        """The size of a piece on the wire in bytes. No other function computes it."""
        return self.codec_of(piece.group, codec).size(self.groups[piece.group].dtype, piece.numel)

    def piece_bytes(self, piece: Piece) -> int:
        """Size of a piece in bytes."""
        return piece.numel * self.groups[piece.group].dtype.itemsize


def shards_of(size: int, world_size: int, *, near: bool = False) -> int:
    """The number of shards for ``size`` bytes: a multiple of the number of ranks.

    No shard is larger than ``SHARD_BYTES``; in a folder (``near``), it may be four times as large.
    """
    most = SHARD_BYTES * (_IN_A_FOLDER if near else 1)
    return world_size * max(1, -(-size // (world_size * most)))

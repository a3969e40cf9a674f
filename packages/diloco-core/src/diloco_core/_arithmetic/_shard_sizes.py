"""How an elastic run divides its values into shards."""

from __future__ import annotations

SHARD_BYTES = 16 * 2**20
"""The most bytes of values in a shard. With momentum, the shard's object is twice as large; obstore sends it in one request."""


def shards_of(size: int, world_size: int) -> int:
    """The number of shards for ``size`` bytes: the same number for every rank, and no shard larger than ``SHARD_BYTES``."""
    return world_size * max(1, -(-size // (world_size * SHARD_BYTES)))

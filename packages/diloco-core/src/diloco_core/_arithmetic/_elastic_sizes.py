"""How an elastic run cuts its values."""

from __future__ import annotations

SHARD_BYTES = 16 * 2**20
"""Most bytes of values in a shard; with the momentum its object has twice as many, and obstore sends it in one request."""


def shards_of(size: int, world_size: int) -> int:
    """How many shards there are of so many bytes: some for every rank, none larger than ``SHARD_BYTES``."""
    return world_size * max(1, -(-size // (world_size * SHARD_BYTES)))

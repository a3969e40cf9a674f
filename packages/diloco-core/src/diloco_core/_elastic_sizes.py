"""How an elastic run cuts its values, and how much of them it holds in memory while it reads."""

from __future__ import annotations

from ._store_blocks import BLOCK_BYTES

SHARD_BYTES = 16 * 2**20
"""Most bytes of values in a shard; with the momentum its object has twice as many, and obstore sends it in one request."""

GATHER_BLOCK_BYTES = BLOCK_BYTES // 2
"""How much of a contribution is read before the next one's turn where every replica keeps all of the outer state as well.

Sums are held for a block, and memory is scarcer there.
"""

GATHER_BUDGET_BYTES = 24 * 2**20
"""Memory for reading ahead there."""


def shards_of(size: int, world_size: int) -> int:
    """How many shards there are of so many bytes: some for every rank, none larger than ``SHARD_BYTES``."""
    return world_size * max(1, -(-size // (world_size * SHARD_BYTES)))

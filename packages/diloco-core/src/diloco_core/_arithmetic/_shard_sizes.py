"""How a run divides its values into shards."""

from __future__ import annotations

SHARD_BYTES = 16 * 2**20
"""The most bytes of values in a shard.

With momentum, the shard's object is twice as large; obstore sends it in one request.
"""

# Times as many bytes: nothing is gained by writing several files at once, and each costs a
# millisecond
_IN_A_FOLDER = 4


def shards_of(size: int, world_size: int, *, near: bool = False) -> int:
    """The number of shards for ``size`` bytes: a multiple of the number of ranks.

    No shard is larger than ``SHARD_BYTES``; in a folder (``near``), it may be four times as large.
    """
    most = SHARD_BYTES * (_IN_A_FOLDER if near else 1)
    return world_size * max(1, -(-size // (world_size * most)))

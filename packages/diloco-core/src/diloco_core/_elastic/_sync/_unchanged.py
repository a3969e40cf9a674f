"""Whether the outer optimizer's state of a shard is still what was published when the shard is updated."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ..._errors import CorruptedObjectError
from ..._wire._published import shard_metadata

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from ..._arithmetic._layout import Piece
    from ..._arithmetic._sharded import Source
    from ._result import Result

_log = logging.getLogger("diloco_core")


def watched(
    result: Result, shards: Sequence[int], first: Source
) -> tuple[Source, Callable[[], None]]:
    """Check that the outer optimizer's state is still what was published. Only its owner can tell if it changed in memory.

    Its checksum is computed chunk by chunk, right before the update reads the chunk, so that the update finds it in the
    processor's cache.

    Args:
        result: The result that is computed.
        shards: The shards to update, in this order.
        first: The source that is read first for every chunk.

    Returns:
        A source to be used instead of ``first``, which computes the checksum too; and a function to be called after the last
        chunk, which raises an error if the state has changed.
    """
    life, progress, previous = result.life, result.progress, result.previous
    sums = {
        shard: life.shard(previous, result.index, shard).summing(
            shard_metadata(result.job, previous)
        )
        for shard in shards
        if previous and progress.rests[shard] is not None
    }
    if not sums:
        return first, lambda: None
    # The chunks are read in this order; a chunk itself does not say to which shard it belongs.
    shard_of_chunk = (
        shard for shard in shards for _ in result.layout.chunks(shard, life.chunk_bytes)
    )

    def summed(piece: Piece, out: torch.Tensor) -> torch.Tensor:
        shard = next(shard_of_chunk)
        if shard in sums:
            sums[shard][0](piece)
        return first(piece, out)

    def unchanged() -> None:
        for shard, (_, total) in sums.items():
            if total() != progress.rests[shard]:
                raise _changed_in_memory(result, shard)

    return summed, unchanged


def _changed_in_memory(result: Result, shard: int) -> CorruptedObjectError:
    error = CorruptedObjectError(
        f"the outer optimizer's state of shard {shard} of fragment {result.job.name} has changed in memory since sync "
        f"{result.previous}: it is not what was published"
    )
    _log.error(
        "rank %d: %s. Reading it again. Check the memory of this machine.",
        result.life.rank,
        str(error).rstrip("."),
    )
    return error

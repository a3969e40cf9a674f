"""Whether what a shard is updated from is still what was published: its outer state, and values to which a change is added."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import xxhash

from ..._errors import CorruptedObjectError
from ..._wire._published import shard_metadata
from ..._wire._sections import view

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

    So can it of the values, where state is published encoded.

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
    if life.fixed and result.job.coded is None:
        # What is wrong in the memory of an owner is wrong in what it sends, too: nobody else holds its own part.
        return first, lambda: None
    # What is published encoded is decoded in memory.
    published = progress.rests if result.job.coded is None else progress.outer_sums
    sums = {
        shard: life.shard(previous, result.index, shard).summing(
            shard_metadata(result.job, previous, progress.without.get(shard, ""))
        )
        for shard in shards
        if previous and published[shard] is not None
    }
    # If state is published as it is, all replicas take whatever values the owner publishes. But a change is added to the values
    # that each of them holds: if those of the owner were others, nobody would come to the sum that it publishes.
    values = (
        {}
        if result.job.coded is None
        else {shard: xxhash.xxh3_64(seed=_values_seed(result, shard)) for shard in shards}
    )
    if not sums and not values:
        return first, lambda: None
    # The chunks are read in this order; a chunk itself does not say to which shard it belongs.
    shard_of_chunk = (
        shard for shard in shards for _ in result.layout.chunks(shard, life.chunk_bytes)
    )

    def summed(piece: Piece, out: torch.Tensor) -> torch.Tensor:
        shard = next(shard_of_chunk)
        if shard in sums:
            sums[shard][0](piece)
        if shard in values:
            values[shard].update(view(result.job.published(piece)))
        return first(piece, out)

    def unchanged() -> None:
        for shard, (_, total) in sums.items():
            if total() != published[shard]:
                raise _changed_in_memory(result, shard, "outer optimizer's state")
        for shard, digest in values.items():
            if digest.intdigest() != progress.sums[shard]:
                raise _changed_in_memory(result, shard, "global copy")

    return summed, unchanged


def _values_seed(result: Result, shard: int) -> int:
    return result.life.shard(result.previous, result.index, shard).values().seed


def _changed_in_memory(result: Result, shard: int, what: str) -> CorruptedObjectError:
    error = CorruptedObjectError(
        f"the {what} of shard {shard} of fragment {result.job.name} has changed in memory since sync "
        f"{result.previous}: it is not what was published"
    )
    _log.error(
        "rank %d: %s. Reading it again. Check the memory of this machine.",
        result.life.rank,
        str(error).rstrip("."),
    )
    return error

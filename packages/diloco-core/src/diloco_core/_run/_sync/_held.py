"""The base of an update: the values of a shard after the last sync, and its outer state.

Every incarnation holds all values. The outer state of a shard is held only by the incarnation that
has updated the shard last. If another incarnation updates it next, that incarnation reads the outer
state. What is held is compared with what was published.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import xxhash

from ..._arithmetic._layout import Piece
from ..._arithmetic._sharded import Source
from ..._errors import CorruptedObjectError, ObjectNotFoundError
from ..._store._api import ObjectReader
from ..._wire._published import WITHOUT, shard_metadata
from ..._wire._sections import view
from .._incarnation._incarnation import Incarnation
from .._incarnation._progress import Progress
from .._records._rules import done_states
from .._repair import readable_done
from .._states._load import read_values
from ._result import Result


def begin_to_hold(incarnation: Incarnation, progress: Progress, number: int) -> bool:
    """Say whether a part of a shard has to be read, because memory does not hold it.

    The shard is that after the fragment's last sync.
    """
    has_values = progress.values_at[number] == progress.sync
    if has_values and progress.outer_at[number] == progress.sync:
        return False
    progress.forget_outer(number, incarnation.chunk_bytes)
    if has_values and not progress.sync and not incarnation.manifest.first:
        progress.outer_at[number] = 0  # no outer step has been taken yet
        return False
    return True


def hold(incarnation: Incarnation, progress: Progress, number: int, reader: ObjectReader) -> None:
    """Read what memory lacks of a shard from its file, and from others that its values are made of.

    Raises:
        CorruptedObjectError: It is not what was published.
        ObjectNotFoundError: Another file is gone.
    """
    key, stored = incarnation.file(progress, number)
    sync, origin = progress.sync, incarnation.origin(key)
    if sync or incarnation.manifest.first:
        described, chunks, scalars = stored.described(reader, origin, progress.rests[number])
        progress.job.install_outer(chunks, scalars)
        progress.without.pop(number, None)
        if WITHOUT in described:
            progress.without[number] = described[WITHOUT]
        incarnation.traffic.received += stored.rest_bytes(reader.size)
    if progress.values_at[number] != sync and incarnation.made_of(sync, progress.index) == [sync]:
        stored.load(reader, origin, incarnation.scratch, progress.expected(number))
        incarnation.traffic.received += reader.size - stored.rest_bytes(reader.size)
        progress.values_at[number] = sync
    elif progress.values_at[number] != sync:
        missing = read_values(incarnation, progress, number)
        if missing is not None:
            raise ObjectNotFoundError(f"{incarnation.origin(missing)} is gone")
    note_outer(incarnation, progress, number, sync, progress.without.get(number, ""))


def note_outer(
    incarnation: Incarnation, progress: Progress, number: int, sync: int, without: str
) -> None:
    """Note that memory holds the outer state of a shard after a sync.

    This also keeps what is needed to see later whether it has changed there.
    """
    progress.outer_at[number] = sync
    if sync and progress.job.coded is not None:
        shard = incarnation.shard(sync, progress.index, number)
        progress.outer_sums[number] = shard.memory_sum(shard_metadata(progress.job, sync, without))


def state_before(incarnation: Incarnation, index: int) -> Progress | None:
    """Return the progress for reading the state from which a fragment's last sync started.

    None if the store no longer holds that state, or its record cannot be read.
    """
    progress = incarnation.fragments[index]
    if progress.commit is None:
        return None
    rollbacks = [rollback for rollback, _ in incarnation.standing.rollbacks]
    complete = done_states(incarnation.store.list("state/"), len(incarnation.fragments), rollbacks)[
        index
    ]
    for sync in sorted({0, *complete}, reverse=True):
        if sync >= progress.sync:
            continue
        done = readable_done(incarnation, sync, index) if sync else incarnation.manifest.done(index)
        if done is not None and len(done.sums) == len(done.rests) == progress.job.layout.shards:
            before = Progress.recorded(progress.job, done)
            if before.digest == progress.commit.base:
                return before
    return None


def watched(
    result: Result, shards: Sequence[int], first: Source
) -> tuple[Source, Callable[[], None]]:
    """Check that the outer optimizer's state is still what was published.

    Only its owner can tell if it changed in memory.

    So can it of the values, where state is published encoded.

    Its checksum is computed chunk by chunk, right before the update reads the chunk, so that the
    update finds it in the processor's cache.

    Args:
        result: The result that is computed.
        shards: The shards to update, in this order.
        first: The source that is read first for every chunk.

    Returns:
        A source to be used instead of ``first``, which computes the checksum too; and a function to
        be called after the last chunk, which raises an error if the state has changed.
    """
    incarnation, progress, previous = result.incarnation, result.progress, result.previous
    if incarnation.fixed and result.job.coded is None:
        # What is wrong in the memory of an owner is wrong in what it sends, too: nobody else holds
        # its own part.
        return first, lambda: None
    # What is published encoded is decoded in memory.
    published = progress.rests if result.job.coded is None else progress.outer_sums
    sums = {
        shard: result.before(shard).summing(progress.metadata(shard))
        for shard in shards
        if previous and published[shard] is not None
    }
    # If state is published as it is, all replicas take whatever values the owner publishes. But a
    # change is added to the values that each of them holds: if those of the owner were others,
    # nobody would come to the sum that it publishes.
    values = (
        {}
        if result.job.coded is None
        else {shard: xxhash.xxh3_64(seed=result.before(shard).values().seed) for shard in shards}
    )
    if not sums and not values:
        return first, lambda: None
    # The chunks are read in this order; a chunk itself does not say to which shard it belongs.
    shard_of_chunk = (
        shard for shard in shards for _ in result.layout.chunks(shard, incarnation.chunk_bytes)
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


def _changed_in_memory(result: Result, shard: int, what: str) -> CorruptedObjectError:
    error = CorruptedObjectError(
        f"the {what} of shard {shard} of fragment {result.job.name} has changed in memory since "
        f"sync {result.previous}: it is not what was published"
    )
    result.incarnation.say.error(
        "%s. Reading it again. Check the memory of this machine.",
        str(error).rstrip("."),
    )
    return error

"""What an update starts from: the values of a shard after the fragment's last sync, and the outer optimizer's state for it.

Every life holds all values. The outer state of a shard is held only by the life that has updated the shard last. If another life
updates it next, that life reads the outer state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..._errors import ObjectNotFoundError
from ..._wire._published import WITHOUT, shard_metadata
from .._life._progress import Progress
from .._records._rules import done_states
from .._repair import readable_done
from .._states._values import read_values

if TYPE_CHECKING:
    from ..._store._api import ObjectReader
    from .._life._life import Life


def begin_to_hold(life: Life, progress: Progress, number: int) -> bool:
    """Whether a part of a shard after the fragment's last sync has to be read, because memory does not hold it."""
    has_values = progress.values_at[number] == progress.sync
    if has_values and progress.outer_at[number] == progress.sync:
        return False
    progress.forget_outer(number, life.chunk_bytes)
    if has_values and not progress.sync and not life.manifest.first:
        progress.outer_at[number] = 0  # no outer step has been taken yet
        return False
    return True


def hold(life: Life, progress: Progress, index: int, number: int, reader: ObjectReader) -> None:
    """Read what memory lacks of a shard from its file, and from others that its values are made of.

    Raises:
        CorruptedObjectError: It is not what was published.
        ObjectNotFoundError: Another file is gone.
    """
    sync, origin = progress.sync, life.origin(life.key(progress.sync, index, number))
    stored = life.shard(sync, index, number)
    if sync or life.manifest.first:
        described, chunks, scalars = stored.described(reader, origin, progress.rests[number])
        progress.job.install_outer(chunks, scalars)
        progress.without.pop(number, None)
        if WITHOUT in described:
            progress.without[number] = described[WITHOUT]
        life.traffic.received += stored.rest_bytes(reader.size)
    if progress.values_at[number] != sync and life.made_of(sync, index) == [sync]:
        stored.load(reader, origin, life.scratch, progress.expected(number))
        life.traffic.received += reader.size - stored.rest_bytes(reader.size)
        progress.values_at[number] = sync
    elif progress.values_at[number] != sync:
        missing = read_values(life, progress, index, number)
        if missing is not None:
            raise ObjectNotFoundError(f"{life.origin(missing)} is gone")
    note_outer(life, progress, index, number, sync, progress.without.get(number, ""))


def note_outer(
    life: Life, progress: Progress, index: int, number: int, sync: int, without: str
) -> None:
    """Note that memory holds the outer state of a shard after a sync, and how to see later whether it has changed there."""
    progress.outer_at[number] = sync
    if sync and progress.job.coded is not None:
        shard = life.shard(sync, index, number)
        progress.outer_sums[number] = shard.memory_sum(shard_metadata(progress.job, sync, without))


def state_before(life: Life, index: int) -> Progress | None:
    """The progress of a life that is about to read the state from which a fragment's last sync started.

    None if the store no longer holds that state, or its record cannot be read.
    """
    progress = life.fragments[index]
    if progress.commit is None:
        return None
    rollbacks = [rollback for rollback, _ in life.rollbacks]
    complete = done_states(life.store.list("state/"), len(life.fragments), rollbacks)[index]
    for sync in sorted({0, *complete}, reverse=True):
        if sync >= progress.sync:
            continue
        done = readable_done(life, sync, index) if sync else life.manifest.done(index)
        if done is not None and len(done.sums) == len(done.rests) == progress.job.layout.shards:
            before = Progress.recorded(progress.job, done)
            if before.digest == progress.commit.base:
                return before
    return None

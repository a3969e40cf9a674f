"""What an update starts from: the values of a shard after the fragment's last sync, and the outer optimizer's state for it.

Every life holds all values. The outer state of a shard is held only by the life that has updated the shard last. If another life
updates it next, that life reads the outer state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._life._progress import Progress, not_as_recorded
from .._records._rules import done_states
from .._repair import readable_done

if TYPE_CHECKING:
    from ..._store._api import ObjectReader
    from .._life._life import Life


def begin_to_hold(life: Life, progress: Progress, number: int) -> bool:
    """Whether a part of a shard after the fragment's last sync has to be read, because memory does not hold it."""
    has_values = progress.values_at[number] == progress.sync
    if has_values and progress.outer_at[number] == progress.sync:
        return False
    progress.forget_outer(number, life.chunk_bytes)
    if has_values and not progress.sync:
        progress.outer_at[number] = 0  # no outer step has been taken yet
        return False
    return True


def hold(life: Life, progress: Progress, index: int, number: int, reader: ObjectReader) -> None:
    """Read what memory lacks of a shard from its file.

    Raises:
        CorruptedObjectError: It is not what was published.
    """
    sync, origin = progress.sync, life.origin(life.key(progress.sync, index, number))
    stored, has_values = life.shard(sync, index, number), progress.values_at[number] == sync
    if sync:
        progress.job.install_outer(*stored.outer_state(reader, origin, progress.rests[number]))
    if (
        not has_values
        and stored.adopt(reader, origin, life.scratch).values != progress.sums[number]
    ):
        raise not_as_recorded(origin)
    layout = progress.job.layout
    value_bytes = sum(map(layout.piece_bytes, layout.shard(number)))
    life.traffic.received += reader.size - (value_bytes if has_values else 0)
    progress.values_at[number] = progress.outer_at[number] = sync


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

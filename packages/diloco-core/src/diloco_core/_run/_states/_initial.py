"""The initial state of a run, if a replica has its values already, from the same seed or the same checkpoint.

Until a newer state is complete, it is the only state of the run, and it cannot be computed again. But most replicas begin with
the same values. They need not read them; and what is damaged or gone in the store, they write again, when they begin and when
others ask for it. Later they hold other values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..._arithmetic._sharded import adopt_shard
from .._life._progress import Progress
from .._records._keys import Delta, commit_key, commit_sync, deltas
from .._records._rules import newest_whole
from .._repair import mend_shard

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch

    from ..._arithmetic._layout import Piece
    from .._life._life import Life
    from .._records._records import Done


def shards_in_memory(life: Life, index: int, done: Done) -> set[int]:
    """The shards of a fragment's initial state whose values memory holds."""
    return {
        number
        for number, values in enumerate(done.sums)
        if life.shard(0, index, number).digest() == values
    }


def shards_to_look_at(life: Life, held: Iterable[int]) -> set[int]:
    """Those of the shards in memory whose files this rank reads when it begins, so that damage is found while it can be mended.

    When a run begins, each rank checks the shards with ``number % world_size == rank``; a replica that cannot read one of the
    others asks for it. If there are syncs already, a rank checks all shards: it will replay the syncs, and then no longer hold
    these values.
    """
    if any(map(commit_sync, life.store.list("commits/"))):
        return set(held)
    return {number for number in held if number % life.manifest.world_size == life.rank}


def mend_initial(life: Life) -> None:
    """Check and mend the initial states whose values are still in memory, because another replica cannot read something."""
    for index, progress in enumerate(life.fragments):
        if progress.sync or progress.commit is not None:
            continue
        done = life.manifest.done(index)
        in_memory = shards_in_memory(life, index, done)
        if in_memory and not _is_collected(life, index):
            for number in in_memory:
                mend_shard(life, Progress.recorded(progress.job, done), index, number, done)


def take_from_memory(
    life: Life, index: int, number: int, fresh: Progress, listing: Mapping[str, int], *, look: bool
) -> bool:
    """Take a shard of the initial state from memory, and mend its file in the store if necessary.

    Args:
        life: The life.
        index: Index of the fragment.
        number: Number of the shard, one of :func:`shards_in_memory`.
        fresh: The fragment's initial state as it is recorded.
        listing: The files of the fragment's initial state in the store.
        look: Whether the shard's file is read and checked, if it is there.

    Returns:
        False if the file was deleted because there are (or were) newer states.
    """
    key, job = life.key(0, index, number), fresh.job
    if key not in listing and _is_collected(life, index):
        return False

    def read(piece: Piece, out: torch.Tensor) -> torch.Tensor:
        return out.copy_(job.published(piece))

    adopt_shard(job, number, read, life.chunk_bytes, life.scratch)
    if look or key not in listing:
        mend_shard(life, fresh, index, number, life.manifest.done(index))
    return True


def _is_collected(life: Life, index: int) -> bool:
    """Whether the initial state of a fragment was deleted by rule, because nothing can be computed from it any more."""
    if newest_whole(life.store.list("state/"), len(life.fragments), life.whole_every)[index]:
        return True
    if life.whole_every > 1:
        return False  # contributions are deleted when any newer state is complete, and this one when a whole one is
    first_sync = index + 1
    return life.store.peek(commit_key(first_sync)) is not None and not any(
        map(Delta.parse, life.store.list(deltas(first_sync)))
    )

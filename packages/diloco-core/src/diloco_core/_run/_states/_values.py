"""Taking the values of a shard from files or, of the initial state, from memory.

From files: from the newest one that holds them whole, and those since that say how they changed.

From memory: until a newer state is complete, the initial state is the only one of the run, and it cannot be computed again. But
most replicas begin with the same values, from the same seed or the same checkpoint. They need not read them; and what is damaged
or gone in the store, they write again, when they begin and when others ask for it. Later they hold other values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..._arithmetic._sharded import adopt_shard
from ..._errors import CorruptedObjectError, DivergedError
from .._life._progress import Progress
from .._records._keys import Delta, commit_key, commit_sync, deltas
from .._records._rules import newest_whole
from .._repair import mend_shard

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import torch

    from ..._arithmetic._layout import Piece
    from ..._store._api import ObjectReader
    from .._life._life import Life
    from .._records._records import Done


def read_values(
    life: Life,
    progress: Progress,
    index: int,
    number: int,
    opened: Sequence[ObjectReader | None] = (),
    *,
    begun: bool = False,
) -> str | None:
    """Read the values of a shard of the state that ``progress`` describes into memory, and verify them.

    If any file is damaged, all are read again, from the one that holds the values whole: a change cannot be added twice.

    Args:
        life: The life that reads them.
        progress: The state; memory need not hold anything of it.
        index: Index of the fragment.
        number: Number of the shard.
        opened: The files that the values are made of (:meth:`.Life.made_of`), if they are open already. They are used first,
            and closed.
        begun: Whether memory holds the values of the first of these files already.

    Returns:
        None; or the key of a file that does not exist.

    Raises:
        CorruptedObjectError: A file is damaged, or is not what the record of the state says.
    """
    parts = life.made_of(progress.sync, index)
    readers = list(opened) or [None] * len(parts)
    first = int(begun)

    def read() -> str | None:
        nonlocal first
        # What was opened before, and what memory held, is used by the first attempt only.
        start, first = first, 0
        for place, sync in list(enumerate(parts))[start:]:
            reader, readers[place] = readers[place], None
            key = life.key(sync, index, number)
            if not _take(life, progress, sync, index, number, reader):
                return key
        return None

    missing = life.again(read)
    if missing is None:
        progress.values_at[number] = progress.sync
    return missing


def _take(
    life: Life,
    progress: Progress,
    sync: int,
    index: int,
    number: int,
    opened: ObjectReader | None,
) -> bool:
    """Take the values in a file, or add its change to the values. Returns False if it does not exist."""
    key, shard = life.key(sync, index, number), life.shard(sync, index, number)
    expected = progress.expected(number) if sync == progress.sync else None

    def use(reader: ObjectReader) -> bool:
        shard.load(reader, life.origin(key), life.scratch, expected)
        life.traffic.received += reader.size
        return True

    try:
        return life.store.read(key, use, opened) or False
    except DivergedError as error:
        raise CorruptedObjectError(
            f"{life.origin(key)} does not fit the states before it: with the change in it, the values are not those of the "
            "replica that published it"
        ) from error


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


def mend_initial(life: Life, *, gone: bool = True) -> None:
    """Check and mend the initial states whose values are still in memory, because another replica cannot read something.

    ``gone=False``: what is not there stays away. It may have been deleted since it was no longer needed.
    """
    listing = {} if gone else life.store.list("initial/")
    for index, progress in enumerate(life.fragments):
        if progress.sync or progress.commit is not None or _is_collected(life, index):
            continue
        done = life.manifest.done(index)
        for number in shards_in_memory(life, index, done):
            if gone or life.key(0, index, number) in listing:
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

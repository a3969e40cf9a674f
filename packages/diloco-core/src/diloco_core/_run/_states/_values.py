"""Reading the values of a shard: from the newest file that holds them whole, and the files since that say how they changed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..._errors import CorruptedObjectError, DivergedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..._store._api import ObjectReader
    from .._life._life import Life
    from .._life._progress import Progress


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

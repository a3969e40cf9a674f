"""Taking shards of a sync's result as they were published, so that all lives hold the same bytes, whoever computed them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ..._errors import CorruptedObjectError, DivergedError, ObjectNotFoundError
from ..._store._ahead import open_ahead
from ..._store._reread import read_again
from .._repair import check_shard
from .._round._reload import ReloadError, Why
from .._states._values import read_values

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..._store._api import ObjectReader
    from ..._wire._published import Sums
    from ._result import Result

_log = logging.getLogger("diloco_core")


def listed(result: Result, shards: Iterable[int]) -> dict[int, int]:
    """Those of the shards that are published by now, with the sizes of their files."""
    listing = result.life.store.list(f"state/{result.sync:08}/")
    keys = {result.key(shard): shard for shard in shards}
    return {shard: listing[key] for key, shard in keys.items() if key in listing}


def adopt_listed(result: Result, listing: dict[int, int]) -> list[int]:
    """Adopt shards that :func:`listed` returned, as :func:`adopt` does. Returns those that could be read."""
    life = result.life
    sizes = {result.key(shard): size for shard, size in listing.items()}
    numbers = dict(zip(sizes, listing, strict=True))

    def announce(key: str, reader: ObjectReader) -> None:
        result.shard(numbers[key]).announce(reader, life.origin(key))

    with open_ahead(life.store.store, sizes, announce) as readers:
        opened = zip(listing, readers, strict=True)
        return [shard for shard, reader in opened if adopt(result, shard, reader)]


def adopt(result: Result, shard: int, opened: ObjectReader | None = None) -> bool:
    """Adopt a shard as it was published.

    Returns:
        False if it is not published, or is damaged and has to be computed again.

    Raises:
        ReloadError: The values in memory, to which a published change is added, are not those that it belongs to.
    """
    life, progress = result.life, result.progress
    key, stored = result.key(shard), result.shard(shard)

    if result.job.coded is not None and progress.values_at[shard] != result.previous:
        # This life has begun to compute the shard, and a change can only be added to the values before.
        try:
            if read_values(life, progress, result.index, shard) is not None:
                return False
        except CorruptedObjectError as error:
            raise ReloadError(Why.DAMAGED, damage=error) from error

    def use(reader: ObjectReader) -> Sums:
        if result.job.coded is None:
            progress.values_at[shard] = None
        return stored.adopt(reader, life.origin(key), life.scratch)

    def read() -> Sums | None:
        nonlocal opened  # used by the first attempt only
        already_open, opened = opened, None
        try:
            return life.store.read(key, use, already_open)
        except CorruptedObjectError:
            try:
                life.store.store.open(key).close()
            except ObjectNotFoundError:
                return None  # it was deleted while it was read, and its space was reused
            raise

    try:
        if result.mending:  # parts of the file that adopting does not read may be damaged too
            check_shard(life, result.sync, result.index, shard, result.done)
        sums = read_again(life.timing, read)
    except CorruptedObjectError as error:
        result.damaged[shard] = str(error)
        _log.error("rank %d: %s. It will be computed again.", life.rank, str(error).rstrip("."))
        return False
    except DivergedError:
        changed = CorruptedObjectError(
            f"the global copy of fragment {result.job.name} has changed in memory since sync {result.previous}: with the change "
            f"in {life.origin(key)}, it does not become what the owner of the shard holds"
        )
        _log.error(
            "rank %d: %s.%s Check the memory of this machine.",
            life.rank,
            changed,
            "" if life.fixed else " Reloading the published state.",
        )
        raise ReloadError(Why.CHANGED, damage=changed) from None
    if sums is None:
        return False
    result.damaged.pop(shard, None)
    result.without.pop(shard, None)
    result.settle(shard, *sums)
    progress.forget_outer(shard, life.chunk_bytes)
    life.traffic.received += stored.adopted_bytes
    return True

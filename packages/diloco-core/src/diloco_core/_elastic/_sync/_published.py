"""Taking shards of a sync's result as they were published, so that all lives hold the same bytes, whoever computed them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ..._errors import CorruptedObjectError, ObjectNotFoundError
from ..._store._ahead import open_ahead
from ..._store._reread import read_again
from .._repair import check_shard

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
    """Adopt shards that :func:`listed` returned. Returns those that could be read."""
    life = result.life
    sizes = {result.key(shard): size for shard, size in listing.items()}
    numbers = dict(zip(sizes, listing, strict=True))

    def announce(key: str, reader: ObjectReader) -> None:
        result.shard(numbers[key]).announce(reader, life.origin(key))

    with open_ahead(life.store.store, sizes, announce) as readers:
        return [
            shard
            for shard, reader in zip(listing, readers, strict=True)
            if adopt(result, shard, reader)
        ]


def adopt(result: Result, shard: int, opened: ObjectReader | None = None) -> bool:
    """Adopt a shard as it was published. Returns False if it is not published, or is damaged and has to be computed again."""
    life, progress = result.life, result.progress
    key = result.key(shard)

    def use(reader: ObjectReader) -> Sums:
        progress.values_at[shard] = None
        return result.shard(shard).adopt(reader, life.origin(key), life.scratch)

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
    if sums is None:
        return False
    result.damaged.pop(shard, None)
    result.settle(shard, *sums)
    progress.forget_outer(shard, life.chunk_bytes)
    life.traffic.received += sum(map(result.layout.piece_bytes, result.layout.shard(shard)))
    return True

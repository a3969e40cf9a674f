"""Copies of the states that a run has gone back to, where a life that does not know of it may still delete them.

A life that collects lists first and deletes then, and anything may lie between the two. Only keys that it has never heard of
are safe from it. So what may be in its plans is copied before the run goes back to it, and written again where it is gone.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ._elastic_records import done_key
from ._elastic_rules import is_state

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ._elastic_life import Life
    from ._store import ObjectReader

_FOLDER = "kept/"

_log = logging.getLogger("diloco_core")


def keep(life: Life, index: int, sync: int) -> bool:
    """Copy a fragment's state; False where a part of it is gone already."""
    keys = [life.key(sync, index, number) for number in range(life.fragments[index].job.layout.shards)]
    if sync:
        keys.append(done_key(sync, index))
    return all(_copy(life, key, _FOLDER + key) for key in keys)


def bring_back(life: Life) -> bool:
    """Write those objects again of which there are copies and that are gone; returns whether there were any."""
    kept = _copies(life)
    if not kept:
        return False
    there = life.store.list("state/").keys() | life.store.list("initial/").keys()
    missing = [key for key in kept if key.removeprefix(_FOLDER) not in there]
    for key in missing:
        original = key.removeprefix(_FOLDER)
        _log.error(
            "rank %d: writing %s again from its copy: a life that did not know yet that the run has gone back to it has "
            "deleted it",
            life.rank,
            life.origin(original),
        )
        _copy(life, key, original)
    return bool(missing)


def forget_kept(life: Life, needed_from: Sequence[int]) -> None:
    """Delete copies of fragments that have two newer states by now.

    Args:
        life: Whose.
        needed_from: As :func:`._elastic_rules.kept_from` has found it.
    """
    gone = [
        key
        for key in _copies(life)
        for fragment in [key.rpartition("/")[2][:3]]
        if int(fragment) < len(needed_from) and needed_from[int(fragment)] > 0
    ]
    if gone:
        life.store.delete(gone)


def _copies(life: Life) -> list[str]:
    return [key for key in life.store.list(_FOLDER) if is_state(key.removeprefix(_FOLDER))]


def _copy(life: Life, key: str, target: str) -> bool:
    def use(reader: ObjectReader) -> bytes:
        data = bytearray(reader.size)
        reader.read_into(0, memoryview(data))
        return bytes(data)

    data = life.store.read(key, use)
    if data is None:
        return False
    life.store.create(target, lambda: data)
    return True

"""Copies of the states that a run has gone back to.

An incarnation that does not know of the rollback may still delete the originals.

An incarnation that deletes what is no longer needed lists first and deletes later, and any time may
pass in between. Only keys that it has never seen are safe from it. So a state that it may be about
to delete is copied before the run goes back to it, and written again if it is gone.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..._errors import CorruptedObjectError, RunExistsError
from ..._store._api import RECORD_BYTES, Buffer, ObjectReader, read_bytes
from ..._wire._safetensors import check_extent
from .._incarnation._incarnation import Incarnation
from .._records._keys import done_key
from .._records._records import Done, of_run
from .._records._rules import is_state

_FOLDER = "kept/"


def keep(incarnation: Incarnation, index: int, sync: int) -> bool:
    """Copy all that a fragment's state is made of.

    Returns False if a part of it is already gone or damaged.
    """
    for key in keys_of(incarnation, index, sync):
        data = verified(incarnation, key, key)
        if data is None:
            return False
        incarnation.store.create(_FOLDER + key, lambda: data)  # noqa: B023 - called at once
    return True


def bring_back(incarnation: Incarnation) -> bool:
    """Write objects again that are gone, but of which there are copies.

    Returns whether there were any.
    """
    kept = _copies(incarnation)
    if not kept:
        return False
    present = incarnation.store.list("state/").keys() | incarnation.store.list("initial/").keys()
    missing = [key for key in kept if key not in present]
    why = "it was deleted by a replica that did not know yet that the run had gone back to it"
    return any([_write_again(incarnation, key, why) for key in missing])  # noqa: C419 - all of them


def mend_from_copies(incarnation: Incarnation, index: int, sync: int) -> bool:
    """Write objects of a fragment's state again that are damaged and have an undamaged copy.

    Returns whether there were any.
    """
    kept = _copies(incarnation)
    keys = [key for key in keys_of(incarnation, index, sync) if key in kept]
    damaged = [key for key in keys if verified(incarnation, key, key) is None]
    # A list, so that all are written again.
    return any([_write_again(incarnation, key, "it is damaged") for key in damaged])  # noqa: C419


def forget_kept(incarnation: Incarnation, needed_from: Sequence[int]) -> None:
    """Delete copies of fragments that have two newer states by now.

    Args:
        incarnation: The incarnation.
        needed_from: What :func:`._rules.states_kept_from` returned.
    """
    superseded = {index for index, sync in enumerate(needed_from) if sync > 0}
    copies = _copies(incarnation)
    unneeded = [key for key in copies if int(key.rpartition("/")[2][:3]) in superseded]
    if unneeded:
        incarnation.store.delete([_FOLDER + key for key in unneeded])


def _copies(incarnation: Incarnation) -> list[str]:
    """List the keys of the states of which there are copies."""
    keys = (key.removeprefix(_FOLDER) for key in incarnation.store.list(_FOLDER))
    return [key for key in keys if is_state(key)]


def keys_of(incarnation: Incarnation, index: int, sync: int) -> list[str]:
    """The keys of all that a fragment's state after a sync is made of."""
    parts = incarnation.made_of(sync, index)
    keys = [key for part in parts for key in keys_of_shards(incarnation, index, part)]
    return [*keys, done_key(sync, index)] if sync else keys


def keys_of_shards(incarnation: Incarnation, index: int, sync: int) -> list[str]:
    """The keys of the files in which a fragment's state after a sync is published."""
    shards = range(incarnation.fragments[index].job.layout.shards)
    return [incarnation.key(sync, index, shard) for shard in shards]


def _write_again(incarnation: Incarnation, key: str, why: str) -> bool:
    data = verified(incarnation, _FOLDER + key, key)
    if data is None:
        return False
    incarnation.say.error("writing %s again from its copy: %s", incarnation.origin(key), why)
    incarnation.store.put(key, lambda: [data])
    return True


def verified(incarnation: Incarnation, key: str, original: str) -> bytes | None:
    """Return the bytes of a part of a state or of its copy, once they are verified.

    None if they are gone or are not what was written.
    """
    name = original.rpartition("/")[2]
    index, sync = int(name[:3]), int(original.split("/")[1]) if original.startswith("state/") else 0
    is_done = name.endswith(".done.json")
    if index >= len(incarnation.fragments) or not (
        is_done or incarnation.key(sync, index, int(name[4:9])) == original
    ):
        return None  # of another run
    origin = incarnation.origin(key)

    def use(reader: ObjectReader) -> bytes:
        # One byte more than a record may have is refused like the whole.
        most = min(reader.size, RECORD_BYTES + 1) if is_done else check_extent(reader, key)
        data = read_bytes(reader, 0, most)
        if is_done:
            of_run(Done.from_json(data, sync, index, origin), incarnation.run, origin)
        else:
            shard = incarnation.shard(sync, index, int(name[4:9]))
            shard.check(InMemory(data, origin), origin, incarnation.scratch)
        return data

    try:
        return incarnation.read_file(key, use)
    except (CorruptedObjectError, RunExistsError) as error:
        incarnation.say.error("%s", error)
        return None


class InMemory(ObjectReader):
    """Bytes as an open object; see :class:`._api.ObjectReader`."""

    def __init__(self, data: Buffer, name: str) -> None:
        self._data = memoryview(data)
        self._name = name
        self.size = len(data)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from ``offset``; see :meth:`._api.ObjectReader.read_into`."""
        if offset + len(buffer) > self.size:
            raise CorruptedObjectError(
                f"{self._name} is truncated: it has {self.size} bytes, but at least "
                f"{offset + len(buffer)} are needed"
            )
        buffer[:] = self._data[offset : offset + len(buffer)]

    def close(self) -> None:
        """Do nothing: there is nothing to close."""

"""Carrying the newest whole state of a run from one generation to the next.

The bytes stay the same, so it is the same run. Rank 0 chooses the state and writes down which. Each
rank carries the shards that it updates, and what belongs to it alone. Rank 0 also carries the
records, and last of all the manifest, when everything else is there.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

from ..._errors import CorruptedObjectError
from ..._store._api import ObjectReader
from ..._store._patient import Patient
from ..._store._reread import read_again
from ..._wire._sealed import seal, unsealed_fields
from .._incarnation._incarnation import Incarnation
from .._records._keys import commit_key, parse_inner
from .._records._rules import done_states
from .._states._kept import keys_of, verified
from ._names import FOLDER

_CHOICE = "carried.json"
_MARKS = "carried/"
_BLOCK = 2**20
GO_BACK = (
    "To continue from the state before it, if that is still there, start all ranks again with "
    'resume="newest-whole": what the run has learned since is lost then.'
)

_log = logging.getLogger("diloco_core")


class Choice(NamedTuple):
    """The state that a generation begins with.

    Attributes:
        source: The folder of the generation that holds it.
        sync: Its last sync.
    """

    source: str
    sync: int


def newest_state(incarnation: Incarnation, *, may_go_back: bool) -> int | None:
    """Return the last sync of the newest whole state that a generation holds.

    None if it holds none and that is permitted.

    Args:
        incarnation: Reads the generation.
        may_go_back: Whether to pass over states that are damaged or incomplete.

    Raises:
        CorruptedObjectError: The newest state is incomplete; the error names an object.
    """
    first = incarnation.manifest.first
    done = done_states(incarnation.store.list("state/"), len(incarnation.fragments))
    listing = incarnation.store.list("state/") | incarnation.store.list("initial/")
    numbers = sorted({first}.union(*done), reverse=True)
    for sync in numbers:
        lasts = _lasts(incarnation, sync)
        if any(last and last not in done[index] for index, last in enumerate(lasts)):
            continue  # a later sync of another fragment was finished first; nothing is lost with it
        states = [keys_of(incarnation, index, last) for index, last in enumerate(lasts)]
        keys = [key for state in states for key in state]
        lost = [key for key in keys if key not in listing]
        if lost and not may_go_back:
            raise CorruptedObjectError(
                f"{incarnation.origin(lost[0])} is gone, although later objects show that it was "
                f"there: something else has deleted it. {GO_BACK}"
            )
        if not lost and (not may_go_back or all(verified(incarnation, key, key) for key in keys)):
            return sync
        _log.error(
            "the state after sync %d in %s cannot be used: %s",
            sync,
            incarnation.store.uri,
            f"{lost[0]} is gone" if lost else "it is damaged",
        )
    if may_go_back:
        return None
    raise CorruptedObjectError(f"{incarnation.store.uri} holds no whole state any more. {GO_BACK}")


def _lasts(incarnation: Incarnation, sync: int) -> list[int]:
    """For every fragment, its last sync up to this one; 0 for its initial state."""
    count = len(incarnation.fragments)
    lasts = [0] * count
    for number in range(max(incarnation.manifest.first, sync - count) + 1, sync + 1):
        lasts[incarnation.index(number)] = number
    return lasts


def write_choice(store: Patient, choice: Choice) -> None:
    """Write down, in the new generation, which state it begins with."""
    record = seal("choice", _CHOICE, choice._asdict())
    store.put(_CHOICE, lambda: [record])


def read_choice(store: Patient) -> Choice | None:
    """Return what rank 0 has chosen; None if it has not chosen yet.

    Raises:
        CorruptedObjectError: The record is damaged.
    """

    def read() -> Choice | None:
        data = store.get(_CHOICE)
        if data is None:
            return None
        origin = f"{store.uri}/{_CHOICE}"
        fields = unsealed_fields("choice", _CHOICE, data, origin)
        source = fields.text("source", f"{FOLDER}[0-9]{{6}}-[0-9a-f]{{16}}/")
        return Choice(source, fields.whole("sync"))

    return read_again(store.timing, read)


def carry(incarnation: Incarnation, store: Patient, sync: int, rank: int) -> None:
    """Carry this rank's part of a state into a new generation, and mark that it is there.

    Args:
        incarnation: Reads the earlier generation.
        store: The new generation.
        sync: The last sync of the state.
        rank: The rank of this process.

    Raises:
        CorruptedObjectError: An object is damaged or gone.
    """
    size, lasts = incarnation.manifest.world_size, _lasts(incarnation, sync)
    for index, last in enumerate(lasts):
        for key in keys_of(incarnation, index, last):
            owner = 0 if key.endswith(".json") else int(key.rpartition("/")[2][4:9]) % size
            if owner == rank:
                _carry_state(incarnation, store, key)
    if rank == 0:
        for number in range(max(1, sync - len(lasts) + 1), sync + 1):
            _copy(incarnation.store, store, commit_key(number))
        folder = incarnation.manifest.unsynced.get("folder")
        for key in incarnation.store.list(f"{folder}/") if folder else ():
            _copy(incarnation.store, store, key)
    for key in incarnation.store.list(f"claims/{rank:05}/"):
        _copy(incarnation.store, store, key)
    saved = {key: parse_inner(key) for key in incarnation.store.list(f"inner/{rank:05}/")}
    until = sorted((at, key) for key, at in saved.items() if at is not None and at[1] <= sync)
    for _, key in until[-2:]:
        _copy(incarnation.store, store, key)
    store.put(f"{_MARKS}{rank:05}", lambda: [b"\n"])


def not_carried(store: Patient, world_size: int) -> list[int]:
    """The ranks that have not carried their part yet."""
    marks = store.list(_MARKS)
    return [rank for rank in range(world_size) if f"{_MARKS}{rank:05}" not in marks]


def _carry_state(incarnation: Incarnation, store: Patient, key: str) -> None:
    data = verified(incarnation, key, key)
    if data is None:
        raise CorruptedObjectError(
            f"{incarnation.origin(key)} is damaged or gone, and the run was to continue from it. "
            f"{GO_BACK}"
        )
    store.put(key, lambda: [data])


def _copy(source: Patient, target: Patient, key: str) -> None:
    """Copy an object if it is there, whatever it holds: its readers verify it."""

    def blocks(reader: ObjectReader) -> Iterator[memoryview]:
        buffer = memoryview(bytearray(min(_BLOCK, reader.size)))
        for start in range(0, reader.size, _BLOCK):
            block = buffer[: min(_BLOCK, reader.size - start)]
            reader.read_into(start, block)
            yield block

    source.read(key, lambda reader: target.put(key, partial(blocks, reader)))

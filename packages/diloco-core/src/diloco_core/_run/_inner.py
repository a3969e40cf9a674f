"""Saving the inner state of a replica, for the next life of its rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from .._errors import CorruptedObjectError
from .._inner._file import SavedInner, check_inner
from .._store._api import Buffer
from .._wire._safetensors import check_extent
from ._claims import check_claim
from ._life._life import Life
from ._records._keys import inner_key, parse_inner, parse_residual, residual_key
from ._watch import check_run

_Parse = Callable[[str], tuple[int, int] | None]


def save_inner(life: Life, parts: Callable[[str], Iterable[Buffer]]) -> None:
    """Save the state that belongs to this replica alone, and delete what was saved before.

    A life never touches what its successor has saved. Once it has a successor, it saves nothing more; and what it may have
    begun to write at that moment has its own epoch in the key, which is older than every epoch of the successor.

    Raises:
        FencedError: A newer life of this rank has taken over.
        RunExistsError: The prefix belongs to another run by now.
    """
    epoch_and_sync = life.epoch, life.sync
    _save(life, inner_key(life.rank, *epoch_and_sync), parts)
    older = [each for each in reversed(_keys(life, parse_inner)) if each[0] < epoch_and_sync]
    if life.fixed:
        # The run may go back to the state before its newest one, and this rank with it.
        older = [each for each in older if each[0][1] < life.sync][1:] + [
            each for each in older if each[0][1] == life.sync
        ]
    life.store.delete([old for _, old in older])


def save_residual(life: Life, parts: Callable[[str], Iterable[Buffer]]) -> None:
    """Save what a codec will have lost if the next contribution is counted, and delete what was saved before.

    Raises:
        FencedError: A newer life of this rank has taken over.
        RunExistsError: The prefix belongs to another run by now.
    """
    _save(life, residual_key(life.rank, life.epoch, life.sync + 1), parts)
    # The one before stays: whether this contribution is counted is not known yet.
    life.store.delete([old for _, old in _keys(life, parse_residual)[:-2]])


def saved(life: Life, parse: _Parse) -> Iterator[SavedInner]:
    """What earlier lives of this rank have saved under keys that ``parse`` knows, the newest first."""
    for (_, sync), key in reversed(_keys(life, parse)):
        data = _read(life, key)
        if data is not None:
            yield SavedInner(sync, life.bound(key), life.origin(key), data)


def _save(life: Life, key: str, parts: Callable[[str], Iterable[Buffer]]) -> None:
    check_run(life)
    check_claim(life)
    # This skips the check of the run that other writes make, so that nothing comes between check_claim() and the write.
    life.store.attempt(lambda: life.store.store.put(key, parts(life.bound(key))))


def _keys(life: Life, parse: _Parse) -> list[tuple[tuple[int, int], str]]:
    """Epoch and sync of everything of one kind that lives of this rank have saved, with its key; the newest last."""
    listed = ((parse(key), key) for key in life.store.list(f"inner/{life.rank:05}/"))
    return sorted((written, key) for written, key in listed if written is not None)


def _read(life: Life, key: str) -> bytes | None:
    """The saved state, read again if it is not as it was written; if it never is, the bytes that were read last."""
    data: bytes | None = None

    def read() -> bytes | None:
        nonlocal data
        # Its size is believed once the file itself bears it out.
        size = life.store.read(key, lambda reader: check_extent(reader, life.origin(key)))
        data = None if size is None else life.store.get(key, largest=size)
        if data is not None:
            check_inner(data, life.bound(key), life.origin(key))
        return data

    try:
        return life.again(read)
    except CorruptedObjectError:
        return data or b""

"""Saving the inner state of a replica, for the next incarnation of its rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from .._errors import CorruptedObjectError
from .._inner._file import SavedInner, check_inner
from .._store._api import Buffer
from .._wire._safetensors import check_extent
from ._claims import check_claim, check_run
from ._incarnation._incarnation import Incarnation
from ._records._keys import inner_key, parse_inner


def save_inner(incarnation: Incarnation, parts: Callable[[str], Iterable[Buffer]]) -> None:
    """Save the state that belongs to this replica alone, and delete what was saved before.

    An incarnation never touches what its successor has saved. Once it has a successor, it saves
    nothing more; and what it may have begun to write at that moment has its own epoch in the key,
    which is older than every epoch of the successor.

    Raises:
        FencedError: A newer incarnation of this rank has taken over.
        RunExistsError: The prefix belongs to another run by now.
    """
    epoch_and_sync = incarnation.epoch, incarnation.sync
    key = inner_key(incarnation.rank, *epoch_and_sync)
    check_run(incarnation)
    check_claim(incarnation)
    # This skips the check of the run that other writes make, so that nothing comes between
    # check_claim() and the write.
    put, bound = incarnation.store.store.put, incarnation.bound(key)
    incarnation.store.attempt(lambda: put(key, parts(bound)))
    older = [each for each in reversed(_keys(incarnation)) if each[0] < epoch_and_sync]
    if incarnation.fixed:
        # The run may go back to the state before its newest one, and this rank with it.
        before = [each for each in older if each[0][1] < incarnation.sync]
        older = before[1:] + [each for each in older if each[0][1] == incarnation.sync]
    incarnation.store.delete([old for _, old in older])


def saved(incarnation: Incarnation) -> Iterator[SavedInner]:
    """Yield what earlier incarnations of this rank have saved, the newest first."""
    for (_, sync), key in reversed(_keys(incarnation)):
        data = _read(incarnation, key)
        if data is not None:
            yield SavedInner(sync, incarnation.bound(key), incarnation.origin(key), data)


def _keys(incarnation: Incarnation) -> list[tuple[tuple[int, int], str]]:
    """List what this rank has saved, as epoch and sync with the key, newest last."""
    keys = incarnation.store.list(f"inner/{incarnation.rank:05}/")
    return sorted((written, key) for key in keys if (written := parse_inner(key)) is not None)


def _read(incarnation: Incarnation, key: str) -> bytes | None:
    """Read the saved state, again if it is not as it was written.

    If it never is, the bytes that were read last are returned.
    """
    data: bytes | None = None
    origin = incarnation.origin(key)

    def read() -> bytes | None:
        nonlocal data
        # Its size is believed once the file itself bears it out.
        size = incarnation.store.read(key, lambda reader: check_extent(reader, origin))
        data = None if size is None else incarnation.store.get(key, largest=size)
        if data is not None:
            check_inner(data, incarnation.bound(key), origin)
        return data

    try:
        return incarnation.again(read)
    except CorruptedObjectError:
        return data or b""

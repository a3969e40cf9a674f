"""What a replica keeps of its own in an elastic run: its inner state, for the next life of its rank."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from .._errors import CorruptedObjectError
from .._inner._state import SavedInner, check_inner
from .._store._reread import read_again
from ._claims import check_claim
from ._log._keys import inner_key, parse_inner
from ._start import check_run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from .._store._api import Buffer
    from ._life._life import Life


def save_inner(life: Life, parts: Callable[[str], Iterable[Buffer]]) -> None:
    """Keep what belongs to this replica alone; replaces what was kept before.

    A life that has a successor touches nothing of it: it keeps nothing any more, and what it may have begun to write just
    then is of its own epoch, which is older than anything of the successor's.

    Raises:
        FencedError: A newer life of this rank has taken over.
        RunExistsError: The prefix is another run's by now.
    """
    check_run(life)
    check_claim(life)
    own = life.epoch, life.sync
    key = inner_key(life.rank, *own)
    # Without another look at the run: nothing may come between that for a successor and the writing.
    life.store.attempt(lambda: life.store.store.put(key, parts(life.bound(key))))
    life.store.delete([key for written, key in _keys(life) if written < own])


def saved_inner(life: Life) -> Iterator[SavedInner]:
    """What earlier lives of this rank have kept, the newest first."""
    for (_, sync), key in sorted(_keys(life), reverse=True):
        data = _read(life, key)
        if data is not None:
            yield SavedInner(sync, life.bound(key), life.origin(key), data)


def _keys(life: Life) -> Iterator[tuple[tuple[int, int], str]]:
    for key in life.store.list(f"inner/{life.rank:05}/"):
        written = parse_inner(key)
        if written is not None:
            yield written, key


def _read(life: Life, key: str) -> bytes | None:
    """What was kept, read again where it is not as it was written; the last reading where it never is."""
    data: bytes | None = None

    def read() -> bytes | None:
        nonlocal data
        data = life.store.get(key, largest=sys.maxsize)
        if data is not None:
            check_inner(data, life.bound(key), life.origin(key))
        return data

    try:
        return read_again(life.timing, read)
    except CorruptedObjectError:
        return data or b""

"""Opening many objects: the next ones are opened while one is read, so that the latencies of requests do not add up."""

from __future__ import annotations

from collections import deque
from contextlib import closing, contextmanager
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from ._errors import StoreError
from ._store import InBackground

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator
    from concurrent.futures import Future

    from ._store import ObjectReader, Store

_MOST = 16


@contextmanager
def open_ahead(
    store: Store, keys: Iterable[str], announce: Callable[[str, ObjectReader], object] | None = None
) -> Iterator[Iterator[ObjectReader | None]]:
    """Open objects in the background, where that saves time; gives an iterator with a reader for every key, in order.

    None: open it yourself. It was not opened ahead, or that failed: errors belong into the foreground. A reader belongs to
    who takes it; those that nobody took are closed at the end.

    Args:
        store: Where they are.
        keys: Their keys.
        announce: Called with the key and the open object, to say what will be read of it; also in the background.
    """
    if store.near or not isinstance(store, InBackground):
        yield (None for _ in keys)
        return
    with closing(_opened(store, keys, announce)) as readers:
        yield readers


def _opened(
    store: InBackground, keys: Iterable[str], announce: Callable[[str, ObjectReader], object] | None
) -> Generator[ObjectReader | None, None, None]:
    rest = iter(keys)
    opened: deque[Future[ObjectReader]] = deque()
    try:
        while True:
            acts = (partial(_open, store, key, announce) for key in islice(rest, _MOST - len(opened)))
            opened.extend(map(store.submit, acts))
            if not opened:
                return
            try:
                reader = opened.popleft().result()
            except StoreError:
                yield None
            else:
                yield reader
    finally:
        for future in opened:
            future.cancel()
            future.add_done_callback(_close)


def _open(store: InBackground, key: str, announce: Callable[[str, ObjectReader], object] | None) -> ObjectReader:
    reader = store.open(key)
    if announce is not None:
        try:
            announce(key, reader)
        except BaseException:
            reader.close()
            raise
    return reader


def _close(future: Future[ObjectReader]) -> None:
    if not future.cancelled() and future.exception() is None:
        future.result().close()

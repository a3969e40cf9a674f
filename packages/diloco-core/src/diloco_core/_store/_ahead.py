"""Sending requests before their answers are needed: for what is read later, and several at the same time."""

from __future__ import annotations

from collections import deque
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

from .._errors import StoreError
from ._api import InBackground

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from concurrent.futures import Future

    from ._api import ObjectReader, Store

T = TypeVar("T")


@contextmanager
def open_ahead(
    store: Store, sizes: Mapping[str, int | None], announce: Callable[[str, ObjectReader], object]
) -> Iterator[Iterator[ObjectReader | None]]:
    """Open objects that will be read in this order. The context is an iterator with one reader per key.

    None instead of a reader means that the caller has to open the object: opening it ahead would gain nothing, or its size is
    not known. The caller may close a reader; those that are still open at the end are closed then.

    Args:
        store: Where the objects are.
        sizes: Their keys, and their sizes in bytes from a listing, so that no request is needed to open them.
        announce: Called with each key and its reader, to announce what will be read. If it raises a StoreError, that is
            ignored, since the caller will meet the same error when it reads the object.
    """
    with ExitStack() as stack:
        if store.near:
            yield (None for _ in sizes)
            return
        readers = []
        for key, size in sizes.items():
            reader = None if size is None else stack.enter_context(store.open(key, size))
            if reader is not None:
                with suppress(StoreError):
                    announce(key, reader)
            readers.append(reader)
        yield iter(readers)


def in_parallel(store: Store, acts: Iterable[Callable[[], T]], at_once: int) -> Iterator[T]:
    """Yields what the functions in ``acts`` return, in their order. Up to ``at_once`` of them run at the same time.

    They run one after another if requests to the store cost nothing, or if the store has no threads. Each function must be
    able to run in another thread, and must not wait for anything else that is done in the background. When one raises an
    error, no further ones are started.
    """
    if store.near or not isinstance(store, InBackground):
        yield from (act() for act in acts)
        return
    remaining = iter(acts)
    started: deque[Future[T]] = deque()
    try:
        while True:
            started.extend(map(store.submit, islice(remaining, at_once - len(started))))
            if not started:
                return
            yield started.popleft().result()
    finally:
        for future in started:
            future.cancel()

"""Opening many objects that are read one after another: what will be read from them is announced first."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING

from .._errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from ._api import ObjectReader, Store


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

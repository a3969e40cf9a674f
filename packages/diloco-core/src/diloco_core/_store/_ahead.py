"""Opening many objects that are read one after another: what will be read of them is announced first."""

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
    """Open objects that will be read in this order; gives an iterator with a reader for every key.

    None: open it yourself. Nothing is gained by opening it beforehand, or its size is not known. A reader belongs to who
    takes it; all are closed at the end.

    Args:
        store: Where they are.
        sizes: Their keys and their sizes in bytes, as a listing gives them: so they are opened without a request.
        announce: Called with every key and the open object, to say what will be read of it. What it raises is left to who
            reads the object.
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

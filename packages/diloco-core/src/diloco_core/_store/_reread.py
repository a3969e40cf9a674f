"""Reading ahead, several objects at a time, and again or from a copy if they are damaged.

A bit may have changed in transit, while the object in the store is as it was written. Of objects
that nothing else in a store could replace, copies lie beside them, and hold the same bytes: no
single object that is damaged or deleted ends a run. To restore an object by hand, copy the copy.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from typing import TypeVar

from .._errors import CorruptedObjectError, StoreError
from .._timing import Timing
from ._api import ObjectReader, Store

T = TypeVar("T")

REREADS = (0.05, 0.4, 1.5)
"""Seconds to wait before each further reading."""

_log = logging.getLogger("diloco_core")


def read_again(timing: Timing, read: Callable[[], T], most: int | None = None) -> T:
    """Call ``read``, and call it again if it raises a CorruptedObjectError.

    Returns what it returns.

    Args:
        timing: Its ``sleep`` is used between two readings.
        read: Reads and verifies. It must start from the beginning every time.
        most: How often it may be called again; if left out, once for each of ``REREADS``.

    Raises:
        CorruptedObjectError: The last reading was damaged, too, so the object in the store is.
    """
    for pause in REREADS[:most]:
        try:
            return read()
        except CorruptedObjectError as error:
            _log.warning("reading again in %g s: %s", pause, error)
            timing.sleep(pause)
    return read()


def copy_key(key: str) -> str:
    """The key of the copy of an object: ``manifest.copy.json`` for ``manifest.json``."""
    name, _, ending = key.rpartition(".")
    return f"{name}.copy.{ending}"


def read_or_copy(read: Callable[[str], T], key: str, uri: str) -> T:
    """Read an object; if it is damaged or gone, read its copy, and say so in the log.

    None if both are gone.

    Args:
        read: Reads and verifies the object with a key. Returns None if there is none.
        key: The key of the object.
        uri: Where it is.

    Raises:
        CorruptedObjectError: The object is damaged, and its copy is damaged or gone; or the object
            is gone, and its copy is damaged.
    """
    damage: CorruptedObjectError | None = None
    try:
        content = read(key)
        if content is not None:
            return content
    except CorruptedObjectError as error:
        damage = error
    lost = f"{uri}/{key} is gone" if damage is None else str(damage).rstrip(".")
    try:
        content = read(copy_key(key))
    except CorruptedObjectError as error:
        raise CorruptedObjectError(f"{lost}. Its copy {copy_key(key)} is damaged, too") from error
    if content is not None:
        _log.error(
            "%s. Its copy %s is whole and is used instead. Something outside the run deletes or "
            "changes its objects: find out what does, and stop it.",
            lost,
            copy_key(key),
        )
    elif damage is not None:
        raise CorruptedObjectError(f"{lost}. Its copy {copy_key(key)} is gone") from damage
    return content


def list_folders(
    list_below: Callable[[str], dict[str, int]], keys: Iterable[str]
) -> dict[str, int]:
    """List the folders of some objects, given the ``list`` of a store.

    The result has the sizes of what is there, by key.
    """
    listing: dict[str, int] = {}
    for folder in dict.fromkeys(key.rpartition("/")[0] for key in keys):
        listing.update(list_below(f"{folder}/"))
    return listing


@contextmanager
def open_ahead(
    store: Store, sizes: Mapping[str, int | None], announce: Callable[[str, ObjectReader], object]
) -> Iterator[Iterator[ObjectReader | None]]:
    """Open objects that will be read in this order.

    The context is an iterator with one reader per key.

    None instead of a reader means that the caller has to open the object: opening it ahead would
    gain nothing, or its size is not known. The caller may close a reader; those that are still open
    at the end are closed then.

    Args:
        store: Where the objects are.
        sizes: Their keys, and their sizes in bytes from a listing, so that no request is needed to
            open them.
        announce: Called with each key and its reader, to announce what will be read. If it raises a
            StoreError, that is ignored, since the caller will meet it when it reads the object.
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


def in_parallel(
    store: Store, acts: Iterable[Callable[[], T]], at_once: int | None = None
) -> Generator[T, None, None]:
    """Yield what the functions in ``acts`` return, in their order.

    They run in the background, while the next function is made, and while the caller uses what was
    yielded. They run one after another if requests to the store cost nothing, or if the store has
    no threads. Each function must be able to run in another thread, and must not wait for anything
    else that is done in the background. When one raises an error, no further ones are started.
    Where the caller may end before all were yielded, it closes this iterator: that waits until none
    is running.

    Args:
        store: The store to which they send requests.
        acts: The functions.
        at_once: How many of them run at the same time; if left out, as many as the store can create
            objects.
    """
    background = None if store.near else store.background
    if background is None:
        yield from (act() for act in acts)
        return
    at_once = at_once or background.creates_at_once
    started: deque[Future[T]] = deque()
    try:
        for act in acts:
            if len(started) == at_once:
                yield started.popleft().result()
            started.append(background.submit(act))
        while started:
            yield started.popleft().result()
    finally:
        for future in started:
            if not future.cancel():
                with suppress(Exception):
                    future.result()

"""Sending several requests to a store at the same time, where that saves time."""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

from ._api import InBackground

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from concurrent.futures import Future

    from ._api import Store

T = TypeVar("T")


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

"""Doing several things with a store at the same time, where that saves time."""

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
    """What some acts return, in their order; up to ``at_once`` of them are under way at the same time.

    They run one after another where requests cost nothing, or the store has no threads. An act must be fit for another
    thread, and must not wait for anything that is done in the background. When one raises, no further ones are begun.
    """
    if store.near or not isinstance(store, InBackground):
        yield from (act() for act in acts)
        return
    rest = iter(acts)
    begun: deque[Future[T]] = deque()
    try:
        while True:
            begun.extend(map(store.submit, islice(rest, at_once - len(begun))))
            if not begun:
                return
            yield begun.popleft().result()
    finally:
        for future in begun:
            future.cancel()

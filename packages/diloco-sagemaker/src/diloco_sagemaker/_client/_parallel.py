"""Make the same call for many jobs, a few at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

AT_ONCE = 8


def at_once(call: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Return what ``call`` returns for each item, in order.

    If calls fail, their first error is raised when all calls have ended.
    """
    if len(items) < 2:
        return [call(item) for item in items]
    with ThreadPoolExecutor(
        min(AT_ONCE, len(items)), thread_name_prefix="diloco-sagemaker"
    ) as pool:
        contexts = [copy_context() for _ in items]  # a deadline applies in every thread
        return list(pool.map(lambda context, item: context.run(call, item), contexts, items))


def outcomes(call: Callable[[T], R], items: Sequence[T]) -> list[R | BaseException]:
    """Do the same as :func:`at_once`, but return each error in place of the value."""

    def one(item: T) -> R | BaseException:
        try:
            return call(item)
        except Exception as error:  # noqa: BLE001 - it is the outcome of this item
            return error

    return at_once(one, items)

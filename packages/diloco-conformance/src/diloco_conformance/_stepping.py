"""Do something, or let another thread go on, between two lines of an executor.

An error that shows only if something happens just then would otherwise be seen once in a thousand
runs: a scripted world answers at once, so that a thread is hardly ever interrupted.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any, NamedTuple

from diloco_protocol import BaseExecutor

FEW = 48
"""If a call comes through at most this many lines, all of them are tried."""
MOMENTS = 16
"""If it comes through more lines than that, about this many are tried."""
GIVEN_UP = 0.5
"""Real seconds after which a call goes on although the other has not ended.

The other one may wait for a lock that the first one holds.
"""

Place = tuple[CodeType, int]
"""A function, and the number of a line in it."""


@contextlib.contextmanager
def each_line(
    executor: BaseExecutor,
    act: Callable[[Place], None],
    *,
    elsewhere: bool = True,
    event: str = "line",
) -> Iterator[None]:
    """Call ``act`` before each line of the executor's package.

    Args:
        executor: The executor whose package it is.
        act: Called with the place.
        elsewhere: Whether threads that start meanwhile are included.
        event: With ``"exception"``, call ``act`` where an error reaches a line instead.
    """
    packages = {
        cls.__module__.partition(".")[0]
        for cls in type(executor).__mro__
        if issubclass(cls, BaseExecutor) and cls is not BaseExecutor
    }

    def look(frame: FrameType, kind: str, _: Any) -> Any:
        module = frame.f_globals.get("__name__", "")
        if kind == "call" and module.partition(".")[0] in packages:
            return step
        return None

    def step(frame: FrameType, kind: str, _: Any) -> Any:
        if kind == event:
            act((frame.f_code, frame.f_lineno))
        return step

    before, before_elsewhere = sys.gettrace(), threading.gettrace()
    if elsewhere:
        threading.settrace(look)
    sys.settrace(look)
    try:
        yield
    finally:
        sys.settrace(before)
        if elsewhere:
            threading.settrace(before_elsewhere)


def places(executor: BaseExecutor, call: Callable[[], Any]) -> tuple[Any, list[Place]]:
    """Return what a call gives, and the lines of the executor that are to be tried.

    The lines are those that the call comes through, each once.
    """
    seen: dict[Place, None] = {}
    with each_line(executor, lambda place: seen.setdefault(place), elsewhere=False):
        gave = call()
    every = 1 if len(seen) <= FEW else math.ceil(len(seen) / MOMENTS)
    return gave, list(seen)[::every]


class Two(NamedTuple):
    """The outcomes of two calls: what they gave or raised.

    Attributes:
        first: The outcome of the first.
        second: The outcome of the second.
        meanwhile: Whether the second came back while the first was still under way.
    """

    first: Any
    second: Any
    meanwhile: bool = False


def interrupted(
    executor: BaseExecutor, first: Callable[[], Any], second: Callable[[], Any], where: Place
) -> Two:
    """Return what two calls give or raise.

    The second is made in another thread when the first reaches a line.
    """
    answers: list[Any] = [None, None]
    meanwhile = False

    def answer(number: int, call: Callable[[], Any]) -> None:
        try:
            answers[number] = call()
        except Exception as error:  # noqa: BLE001 - the error is the outcome of this call
            answers[number] = error

    other = threading.Thread(target=answer, args=(1, second), daemon=True)

    def act(place: Place) -> None:
        nonlocal meanwhile
        if place == where and other.ident is None:
            other.start()
            other.join(GIVEN_UP)
            meanwhile = not other.is_alive()

    with each_line(executor, act, elsewhere=False):
        answer(0, first)
    if other.ident is None:  # this time the first did not reach the line
        other.start()
    other.join()
    return Two(answers[0], answers[1], meanwhile)

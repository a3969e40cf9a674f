"""Retries with growing, jittered delays."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from ._checks import is_number, shown
from ._errors import BackendError, InvalidRequestError, ThrottledError

T = TypeVar("T")
_LATEST: ContextVar[float] = ContextVar("the latest moment of a further try", default=math.inf)


def _uniform() -> float:
    import random  # slow to import, and only needed when something waits

    return random.random()


@dataclass(frozen=True, slots=True)
class Backoff:
    """Growing delays: ``first``, ``first * factor`` and so on, up to ``cap``.

    Each delay is shortened at random by up to the share ``jitter``. Immutable and safe to share
    between threads. The clock, the sleep and the randomness are injected.

    Attributes:
        first: First delay in seconds.
        factor: Growth per delay.
        cap: Longest delay in seconds.
        jitter: Share of a delay that is random, in [0, 1], so that callers that failed together do
            not return together.
        clock: Monotonic clock in seconds.
        sleep: Sleeps for the given number of seconds.
        uniform: Returns a random number in [0, 1).
    """

    first: float = 0.5
    factor: float = 2.0
    cap: float = 30.0
    jitter: float = 0.25
    clock: Callable[[], float] = field(default=time.monotonic, repr=False)
    sleep: Callable[[float], None] = field(default=time.sleep, repr=False)
    uniform: Callable[[], float] = field(default=_uniform, repr=False)

    def __post_init__(self) -> None:
        values = {name: getattr(self, name) for name in ("first", "cap", "factor", "jitter")}
        numbers = all(map(is_number, values.values()))
        if not (
            numbers and 0 < self.first <= self.cap and self.factor >= 1 and 0 <= self.jitter <= 1
        ):
            raise InvalidRequestError(
                "a back-off needs 0 < first <= cap, factor >= 1 and 0 <= jitter <= 1, not "
                + ", ".join(f"{name}={shown(value)}" for name, value in values.items())
            )

    def delays(self) -> Iterator[float]:
        """Yield the delays in seconds, without end."""
        delay = self.first
        while True:
            yield delay * (1 - self.jitter * self.uniform())
            delay = min(delay * self.factor, self.cap)


class Patiently(Protocol):
    """A function that makes a call, and repeats it for a while if its error may pass."""

    def __call__(self, call: Callable[[], T], /) -> T:
        """Return what ``call`` returns."""


@contextlib.contextmanager
def no_try_after(moment: float) -> Iterator[None]:
    """Have every :func:`retry` in this thread give up at a moment of its back-off's clock."""
    before = _LATEST.set(moment)
    try:
        yield
    finally:
        _LATEST.reset(before)


def latest_try(moment: float) -> float:
    """Return the moment after which this thread tries nothing again: the given or an earlier one.

    Loops of a backend's own that try again have to keep to it, as :func:`retry` does.
    """
    return min(moment, _LATEST.get())


def retry(call: Callable[[], T], backoff: Backoff, *, timeout: float) -> T:
    """Call a function until it returns, as long as its errors are retryable.

    Args:
        call: The function.
        backoff: The delays between calls; a longer ``retry_after`` of the backend takes precedence.
        timeout: Seconds after which the last error is raised instead of trying again.

    Raises:
        BackendError: A non-retryable error, at once; or the last error, when the time is up.
    """
    begun = backoff.clock()
    deadline = latest_try(begun + timeout)
    for delay in backoff.delays():
        try:
            return call()
        except BackendError as error:
            if not error.retryable:
                raise
            if isinstance(error, ThrottledError) and error.retry_after is not None:
                delay = max(delay, error.retry_after)
            if backoff.clock() + delay > deadline:
                note = f"given up after {min(timeout, deadline - begun):g} s of trying again"
                if note not in getattr(error, "__notes__", ()):  # a retry inside may have said so
                    error.add_note(note)
                raise
        backoff.sleep(delay)
    raise AssertionError("delays() has no end")

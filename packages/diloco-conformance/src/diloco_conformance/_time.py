"""A clock that moves only in a sleep, or when the test says so."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator


class Overslept(AssertionError):  # noqa: N818 - it says what happened
    """The error raised in a sleep beyond the time at which the sleeper should have come back."""


class VirtualTime:
    """A clock whose seconds pass when a thread sleeps on it. Thread-safe.

    Attributes:
        limit: A sleep beyond this time raises; None for no limit.
    """

    def __init__(self, now: float = 1_000.0) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._held = False
        self._over = False
        self.limit: float | None = None

    def clock(self) -> float:
        """Return the seconds since some moment."""
        with self._lock:
            return self._now

    def sleep(self, seconds: float) -> None:
        """Let time pass.

        Raises:
            Overslept: That would be beyond the limit.
        """
        with self._lock:
            if self.limit is not None and self._now > self.limit:
                raise Overslept(f"still asleep {self._now - self.limit:g} s after the deadline")
            self._now += max(0.0, seconds)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Let time stand still for sleepers, while the test and another of its threads act."""
        self._held = True
        try:
            yield
        finally:
            self._held = False

    def idle(self) -> bool:
        """Say for a sleep whether time is held; if it is, a real moment has passed instead.

        Raises:
            Overslept: The world is gone, and a sleeper in it is not to go on.
        """
        if self._over:
            raise Overslept("still asleep after the end of the test")
        if self._held:
            time.sleep(0.001)
        return self._held

    def end(self) -> None:
        """End the world: from now on, a sleeper is woken by an exception."""
        self._over = True

"""A clock that only moves when somebody sleeps or the test says so."""

from __future__ import annotations

import threading


class Overslept(AssertionError):  # noqa: N818 - it says what happened
    """Raised in a sleep that goes beyond the time at which the sleeper should have come back."""


class VirtualTime:
    """Seconds that pass when somebody sleeps. Thread-safe.

    Attributes:
        limit: A sleep beyond this time raises; None for no limit.
    """

    def __init__(self, now: float = 1_000.0) -> None:
        self._now = now
        self._lock = threading.Lock()
        self.limit: float | None = None

    def clock(self) -> float:
        """Seconds since some moment."""
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

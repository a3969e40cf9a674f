"""One queue of actions to come, on a clock that only the test moves, or on the wall clock."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from datetime import UTC, datetime

_LAST = 253402300799.0  # 9999-12-31T23:59:59Z, the last second that can be written


class Timeline:
    """Runs actions when their time has come.

    Everything that happens later (a lag, a back-off, a deadline, the end of a grace period) is an
    action in this queue, so that a rehearsal on a virtual clock differs from one in real time only
    in how the clock moves. Not thread-safe: its owner calls it under a lock.
    """

    def __init__(self, start: float, clock: Callable[[], float] | None = None) -> None:
        self._now = start
        self._clock = clock
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    @property
    def virtual(self) -> bool:
        """Return whether only ``run_until`` moves the clock."""
        return self._clock is None

    def now(self) -> float:
        """Return the seconds since the epoch."""
        return self._now if self._clock is None else self._clock()

    def stamp(self) -> str:
        """Return the time as the API writes it, to the second."""
        return stamp(self.now())

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Run ``action`` ``seconds`` from now; those of the same moment run in the order given."""
        heapq.heappush(self._queue, (self.now() + max(seconds, 0.0), next(self._order), action))

    def next_due(self) -> float | None:
        """Return when the next action is due; None if nothing is planned."""
        return self._queue[0][0] if self._queue else None

    def step(self) -> bool:
        """Run the next action, moving a virtual clock to its time; False if nothing is planned."""
        if not self._queue:
            return False
        due, _, action = heapq.heappop(self._queue)
        self._now = max(self._now, due)
        action()
        return True

    def run_until(self, moment: float) -> None:
        """Run all actions due up to ``moment``, and leave a virtual clock there."""
        while self._queue and self._queue[0][0] <= moment:
            self.step()
        self._now = max(self._now, moment)


def stamp(moment: float) -> str:
    """Return seconds since the epoch as ``2026-01-01T00:00:00Z``."""
    return datetime.fromtimestamp(min(moment, _LAST), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def seconds(text: str) -> float:
    """Return the seconds since the epoch of a time that ``stamp`` wrote.

    Raises:
        ValueError: it is not a time.
    """
    return datetime.fromisoformat(text).timestamp()

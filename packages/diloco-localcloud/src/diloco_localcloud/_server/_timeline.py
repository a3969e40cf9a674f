"""One queue of actions to come, on a clock that only the test moves, or on the wall clock.

A thread moves it along in real time.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
from collections.abc import Callable
from datetime import UTC, datetime

_LOG = logging.getLogger("diloco_localcloud")
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


class Clock:
    """A virtual clock; thread-safe.

    In real time it cannot be moved: ``advance``, ``settle`` and ``step`` raise ValueError.

    Args:
        timeline: the clock and what is planned.
        changed: the lock that guards it, notified after every move.
    """

    def __init__(self, timeline: Timeline, changed: threading.Condition) -> None:
        self._timeline = timeline
        self._changed = changed

    def now(self) -> float:
        """Return the time of the clock, in seconds since the epoch."""
        with self._changed:
            return self._timeline.now()

    def advance(self, seconds: float) -> None:
        """Let ``seconds`` pass, and do whatever falls due meanwhile."""
        with self._changed:
            timeline = self._virtual()
            timeline.run_until(timeline.now() + seconds)
            self._changed.notify_all()

    def settle(self, within: float = 2.0, most: float = 600.0) -> None:
        """Let time pass until nothing is due within the next ``within`` seconds.

        At most ``most`` seconds pass in all. The usual delays and short graces are shorter than the
        default, and back-offs (10 s and more) are longer.
        """
        with self._changed:
            timeline = self._virtual()
            end = timeline.now() + most
            while (due := timeline.next_due()) is not None and due <= min(
                timeline.now() + within, end
            ):
                timeline.run_until(due)
            self._changed.notify_all()

    def step(self) -> bool:
        """Do the next thing that is due, however late; return False if nothing is due at all."""
        with self._changed:
            return self._virtual().step()

    def _virtual(self) -> Timeline:
        if not self._timeline.virtual:
            raise ValueError("the stand-in was made with real_time=True: its clock cannot be moved")
        return self._timeline


class Ticker:
    """A thread that runs what is due, from ``start`` to ``stop``.

    Args:
        timeline: a timeline on the wall clock.
        changed: the lock that guards the timeline, notified whenever something may have been added
            to it.
    """

    def __init__(self, timeline: Timeline, changed: threading.Condition) -> None:
        self._timeline = timeline
        self._changed = changed
        self._ending = False
        self._thread = threading.Thread(target=self._run, name="ticker", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End; actions that are not due yet never run."""
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        timeline = self._timeline
        with self._changed:
            while not self._ending:
                try:
                    timeline.run_until(timeline.now())
                except Exception:  # noqa: BLE001 - one fault must not stop the clock
                    _LOG.exception("something that was due failed; the stand-in goes on")
                due = timeline.next_due()
                self._changed.wait(None if due is None else max(0.0, due - timeline.now()))

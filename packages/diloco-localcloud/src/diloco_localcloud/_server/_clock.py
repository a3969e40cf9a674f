"""The clock of a stand-in, as a test moves it."""

from __future__ import annotations

import threading

from ._timeline import Timeline


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

"""Virtual time for threads: exactly one of them runs at any moment, so that a run is repeatable to the last operation."""

from __future__ import annotations

import heapq
import itertools
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Killed(BaseException):
    """What ends a simulated process: nothing that it would do afterwards reaches the store."""


class Scheduler:
    """Runs threads in turn, by a clock of its own: a thread runs until it sleeps, then the one whose time comes first.

    Attributes:
        now: Virtual seconds since the start.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, Callable[[], None] | threading.Lock]] = []
        self._order = itertools.count()
        self._back = threading.Lock()
        self._back.acquire()
        self._over = False
        self._limit = 0.0
        self._threads: list[threading.Thread] = []

    def call_at(self, time: float, act: Callable[[], None]) -> None:
        """Call ``act`` at a virtual time; it must not sleep."""
        heapq.heappush(self._queue, (max(time, self.now), next(self._order), act))

    def start_at(self, time: float, body: Callable[[], None]) -> None:
        """Start a thread at a virtual time."""
        gate = threading.Lock()
        gate.acquire()

        def run() -> None:
            gate.acquire()
            try:
                if not self._over:
                    body()
            finally:
                self._hand_over()

        thread = threading.Thread(target=run, daemon=True)
        self._threads.append(thread)
        thread.start()
        heapq.heappush(self._queue, (max(time, self.now), next(self._order), gate))

    def sleep(self, seconds: float) -> None:
        """Let virtual time pass for the calling thread.

        Raises:
            Killed: The simulation is over.
        """
        if self._over:
            raise Killed
        gate = threading.Lock()
        gate.acquire()
        heapq.heappush(self._queue, (self.now + max(0.0, seconds), next(self._order), gate))
        self._hand_over()
        gate.acquire()
        if self._over:
            raise Killed

    def run(self, limit: float) -> bool:
        """Run until nothing is left to do. Returns False, after ending all threads, where ``limit`` seconds were too few."""
        self._limit = limit
        self._hand_over()
        self._back.acquire()
        in_time = not self._queue
        self._end()
        return in_time

    def _end(self) -> None:
        """End all threads that are asleep: each meets :class:`Killed`."""
        self._over = True
        while self._queue:
            _, _, item = heapq.heappop(self._queue)
            if not callable(item):
                item.release()
                self._back.acquire()
        for thread in self._threads:
            thread.join()

    def _hand_over(self) -> None:
        """Wake whoever comes first; the main thread when nobody does."""
        while not self._over and self._queue and self._queue[0][0] <= self._limit:
            time, _, item = heapq.heappop(self._queue)
            self.now = max(self.now, time)
            if callable(item):
                item()
                continue
            item.release()
            return
        self._back.release()

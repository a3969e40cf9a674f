"""Threads that take turns: one of them runs at a time, with random generators of its own."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from .._generators import random_state, set_random_state


class Turns:
    """Threads of which one runs until it sleeps; then it is the turn of whoever is to wake first.

    Their clock goes on only where all of them sleep. So they do the same every time, however long
    it takes them.

    Attributes:
        now: The time by their clock, in seconds.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._error: BaseException | None = None  # why all threads end
        self._order = itertools.count()
        self._sleeping: list[tuple[float, int, threading.Lock]] = []

    def run(self, acts: Sequence[Callable[[], Any]]) -> list[Any]:
        """Call functions in a thread each; return what they return.

        The random generators of each begin as copies of those of the thread that calls this.

        Raises:
            BaseException: The first error of any thread, once all have ended.
        """
        results: list[Any] = [None] * len(acts)

        def run(number: int, gate: threading.Lock, state: dict[str, Any]) -> None:
            gate.acquire()
            set_random_state(state)
            try:
                results[number] = acts[number]()
            except BaseException as error:  # noqa: BLE001 - raised below
                self._error = self._error or error
            self._wake()

        places = [(number, self._gate(0.0), random_state()) for number in range(len(acts))]
        threads = [threading.Thread(target=run, args=place, daemon=True) for place in places]
        for thread in threads:
            thread.start()
        while self._sleeping:
            with suppress(SystemExit):
                self.sleep(0.05)
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error
        return results

    def sleep(self, seconds: float) -> None:
        """Let others run for so many seconds by the clock.

        Raises:
            SystemExit: A thread has failed, so that all are to end.
        """
        gate, state = self._gate(seconds), random_state()
        self._wake()
        try:
            gate.acquire()
        except KeyboardInterrupt as error:  # in the main thread alone, which then waits for others
            self._error = error
            gate.acquire()
        set_random_state(state)
        if self._error is not None:
            raise SystemExit

    def _gate(self, seconds: float) -> threading.Lock:
        """Return a lock that is released when so many seconds have passed."""
        gate = threading.Lock()
        gate.acquire()
        heapq.heappush(self._sleeping, (self.now + seconds, next(self._order), gate))
        return gate

    def _wake(self) -> None:
        time, _, gate = heapq.heappop(self._sleeping)
        self.now = max(self.now, time)
        gate.release()

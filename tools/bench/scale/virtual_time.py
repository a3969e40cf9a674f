"""Virtual time for threads, one of which runs at a time, that may also wait for each other."""

from __future__ import annotations

import heapq
import sys
import threading
from pathlib import Path

# Virtual time is that of the simulated runs, which are with the tests of diloco-core and not in its
# wheel.
sys.path.append(str(Path(__file__).parents[3] / "packages/diloco-core/tests"))

from simulated import Killed, Scheduler


class StuckError(Exception):
    """Every thread waits for another one, or virtual time has run out."""


class VirtualTime(Scheduler):
    """A :class:`Scheduler` whose threads may also wait at gates until somebody opens them."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting: set[threading.Lock] = set()

    def wait_at(self, gate: threading.Lock) -> None:
        """Let the others run until the gate, which is from :func:`closed_gate`, is opened.

        Raises:
            Killed: The simulation is over.
        """
        if self._over:
            raise Killed
        self._waiting.add(gate)
        self._hand_over()
        gate.acquire()
        if self._over:
            raise Killed

    def open(self, gate: threading.Lock) -> None:
        """Let the thread go on that waits at a gate, or will."""
        self._waiting.discard(gate)
        heapq.heappush(self._queue, (self.now, next(self._order), gate))

    def run_all(self, limit: float) -> None:
        """Run until all threads have ended.

        Raises:
            StuckError: They did not within ``limit`` virtual seconds, or wait for each other.
        """
        self._limit = limit
        self._hand_over()
        self._back.acquire()
        late, stuck = len(self._queue), len(self._waiting)
        for gate in list(self._waiting):
            self.open(gate)
        self._end()
        if late or stuck:
            raise StuckError(
                f"{stuck} threads wait for each other, {late} events lie after {limit:g} virtual "
                "seconds"
            )


class Barrier:
    """A place at which threads wait until so many have come; can be used again and again."""

    def __init__(self, time: VirtualTime, threads: int) -> None:
        self._time = time
        self._threads = threads
        self._gates: list[threading.Lock] = []

    def wait(self) -> None:
        """Wait for the others."""
        if len(self._gates) + 1 < self._threads:
            gate = closed_gate()
            self._gates.append(gate)
            self._time.wait_at(gate)
            return
        gates, self._gates = self._gates, []
        for gate in gates:
            self._time.open(gate)


def closed_gate() -> threading.Lock:
    """Something at which one thread can wait."""
    gate = threading.Lock()
    gate.acquire()
    return gate

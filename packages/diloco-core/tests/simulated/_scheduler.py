"""Virtual time for threads: exactly one of them runs at any moment, so that a run is repeatable to
the last operation.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass

from diloco_core import ConfigurationError


class Killed(BaseException):
    """What ends a simulated process: nothing that it would do afterwards reaches the store."""


class Scheduler:
    """Runs threads in turn, by a clock of its own: a thread runs until it sleeps, then the one
    whose time comes first.

    Attributes:
        now: Virtual seconds since the start.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, Callable[[], object] | threading.Lock]] = []
        self._order = itertools.count()
        self._back = threading.Lock()
        self._back.acquire()
        self._over = False
        self._limit = 0.0
        self._threads: list[threading.Thread] = []

    def call_at(self, time: float, act: Callable[[], object]) -> None:
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
        """Run until nothing is left to do.

        Returns False, after ending all threads, where ``limit`` seconds were too few.
        """
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


KINDS = (
    "kill before",
    "kill after",
    "tear",
    "lose request",
    "lose answer",
    "delay",
    "repeat",
    "jump",
    "zombie",
    "flip",
    "stale list",
)
"""What can happen at an operation, and leaves the store as it was written; see :class:`Fault`."""

DAMAGES = ("rot", "torn record")
"""What can happen at an operation, and leaves a damaged object; see :class:`Fault`."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that goes wrong at one store operation of one incarnation.

    Attributes:
        rank: Whose.
        incarnation: In which incarnation of the rank, from 1.
        operation: At which of its operations, from 1.
        kind: One of ``KINDS``, which leave the store as it was written, or of ``DAMAGES``, which
            leave a damaged object:

            * ``"kill before"``: the process dies before the operation takes effect.
            * ``"kill after"``: it dies when the operation has taken effect.
            * ``"tear"``: it dies in the middle of an upload; a plain put leaves a truncated object.
            * ``"lose request"``: an error, and the operation has not taken effect.
            * ``"lose answer"``: an error, but the operation has taken effect.
            * ``"delay"``: it takes long.
            * ``"repeat"``: the network delivers a write again, later.
            * ``"jump"``: the process's clock jumps forward.
            * ``"zombie"``: the process hangs for long, is taken for dead and replaced, and then
              goes on.
            * ``"flip"``: the next reading brings one flipped bit; what lies in the store is whole.
            * ``"stale list"``: the next listing is as it was some seconds ago.
            * ``"rot"``: an object in the store, other than the manifest, gets a flipped bit or is
              cut short.
            * ``"torn record"``: the process dies in a write, and a part of the object is visible,
              whatever it was.
        seconds: How long, for what takes time.

    Raises:
        ConfigurationError: The kind is not known, so that it would never happen.
    """

    rank: int
    incarnation: int
    operation: int
    kind: str
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in (*KINDS, *DAMAGES):
            raise ConfigurationError(f"kind must be one of {(*KINDS, *DAMAGES)}, not {self.kind!r}")

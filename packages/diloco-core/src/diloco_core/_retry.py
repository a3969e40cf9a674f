"""Trying again: how often, how long apart, and when to give up."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")

NOTICE_SECONDS = 60.0
"""How far apart two messages are about one request that is tried again."""


@dataclass(frozen=True, slots=True)
class Retries:
    """Exponential back-off with full jitter, which spreads the replicas that failed together.

    Thread-safe.

    Attributes:
        patience: Seconds after the beginning of the first try from which on nothing is tried again,
            but for a second try.
        first_pause: Longest first pause in seconds; every further one may be twice as long.
        longest_pause: Where that ends, in seconds.
        clock: Monotonic clock; injected in tests.
        sleep: Injected in tests.
        jitter: A number from 0 to 1; injected in tests.
        repeats: Whether anything is tried again at all.
    """

    patience: float = 60.0
    first_pause: float = 0.2
    longest_pause: float = 5.0
    clock: Callable[[], float] = field(default=time.monotonic, repr=False)
    sleep: Callable[[float], None] = field(default=time.sleep, repr=False)
    jitter: Callable[[], float] = field(default=random.random, repr=False)
    repeats: bool = True

    def run(
        self,
        act: Callable[[], T],
        again: Callable[[Exception], bool],
        patience: float | None = None,
        downtime: Downtime | None = None,
    ) -> T:
        """Do something until it succeeds, until ``again`` says no to its error, or patience ends.

        Args:
            act: What to do.
            again: Whether an error may pass.
            patience: Seconds, instead of the attribute.
            downtime: Counts the time from the beginning of the first try that failed.
        """
        start = began = self.clock()
        pause = self.first_pause
        most = self.patience if patience is None else patience
        waiting = tried = False
        try:
            while True:
                try:
                    return act()
                except Exception as error:
                    # Half of a pause is certain, so that a store that is down is not asked in a
                    # tight loop.
                    seconds = pause * (1 + self.jitter()) / 2
                    if not again(error) or not self.repeats:
                        raise
                    if downtime is not None and not waiting:
                        waiting = True
                        downtime.begin(began)
                    # However long the first try took, there is a second one: a slow answer that
                    # gets lost is no outage.
                    if self.clock() - start + seconds > most and tried:
                        raise
                tried = True
                self.sleep(seconds)
                began = self.clock()
                pause = min(2 * pause, self.longest_pause)
        finally:
            if downtime is not None and waiting:
                downtime.end()


class Notices:
    """Says what is being waited for, now and then, so that a long outage does not fill the log.

    Made before the first try.

    Args:
        tell: Takes the message.
        clock: Monotonic clock.
        after: Seconds that have to pass before the first message.
    """

    def __init__(
        self, tell: Callable[[str], None], clock: Callable[[], float], after: float = 0.0
    ) -> None:
        self._tell = tell
        self._clock = clock
        self._since = clock()
        self._next = after

    def failed(self, message: str) -> None:
        """Another try has failed, for this reason."""
        passed = self._clock() - self._since
        if passed >= self._next:
            self._next = passed + NOTICE_SECONDS
            so_far = f", for {passed:.0f} s so far" if passed >= 1 else ""
            self._tell(f"trying again{so_far}: {message}")


class Downtime:
    """The time for which requests have waited for an unavailable store.

    Requests that wait at the same time count once. Thread-safe.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._waiting = 0
        self._since = self._ended = -math.inf
        self._past = 0.0

    def begin(self, since: float) -> None:
        """A request has failed for the first time; that try began at ``since``."""
        with self._lock:
            since = max(since, self._ended)  # what was before is counted already
            self._since = min(self._since, since) if self._waiting else since
            self._waiting += 1

    def end(self) -> None:
        """That request has succeeded, or failed for good."""
        with self._lock:
            self._waiting -= 1
            if not self._waiting:
                self._ended = self._clock()
                self._past += self._ended - self._since

    def seconds(self) -> float:
        """All of it so far."""
        with self._lock:
            return self._past + (self._clock() - self._since if self._waiting else 0.0)

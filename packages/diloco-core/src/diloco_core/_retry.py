"""Trying again: how often, how long apart, and when to give up."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Retries:
    """Exponential back-off with full jitter: replicas that failed together do not come back together. Thread-safe.

    Attributes:
        patience: Seconds after the first try from which on nothing is tried again.
        first_pause: Longest first pause in seconds; every further one may be twice as long.
        longest_pause: Where that ends, in seconds.
        clock: Monotonic clock; injected in tests.
        sleep: Injected in tests.
        jitter: A number from 0 to 1; injected in tests.
    """

    patience: float = 60.0
    first_pause: float = 0.2
    longest_pause: float = 5.0
    clock: Callable[[], float] = field(default=time.monotonic, repr=False)
    sleep: Callable[[float], None] = field(default=time.sleep, repr=False)
    jitter: Callable[[], float] = field(default=random.random, repr=False)

    def run(self, act: Callable[[], T], again: Callable[[Exception], bool]) -> T:
        """Do something until it succeeds, until ``again`` says no to its error, or until patience ends."""
        start = self.clock()
        pause = self.first_pause
        while True:
            try:
                return act()
            except Exception as error:
                # Half of a pause is certain, so that a store that is down is not asked in a tight loop.
                seconds = pause * (1 + self.jitter()) / 2
                if not again(error) or self.clock() - start + seconds > self.patience:
                    raise
            self.sleep(seconds)
            pause = min(2 * pause, self.longest_pause)

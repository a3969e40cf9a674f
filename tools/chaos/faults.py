"""What a fault proxy does to requests, chosen by a seeded generator."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass, field
from enum import StrEnum

_LONGEST_OUTAGE = 3.0


class Fault(StrEnum):
    """One way in which a request goes wrong."""

    CONFLICT = "409 to a conditional write, nothing applied"
    ERROR = "500 or 503, nothing applied"
    RESET = "connection reset, nothing applied"
    LOST = "connection reset after it was applied"
    ERROR_AFTER = "500 or 503 after it was applied"
    EXISTS = "412 to a conditional write that was applied"
    TRUNCATED = "body cut short"
    FLIPPED = "one bit of the body flipped"
    STALE = "listing as it was a second ago"
    SLOW = "answered late"
    OUTAGE = "for some seconds every request fails"


RATES = {
    Fault.CONFLICT: 0.05,
    Fault.ERROR: 0.02,
    Fault.RESET: 0.01,
    Fault.LOST: 0.02,
    Fault.ERROR_AFTER: 0.01,
    Fault.EXISTS: 0.05,
    Fault.TRUNCATED: 0.02,
    Fault.FLIPPED: 0.03,
    Fault.STALE: 0.1,
    Fault.SLOW: 0.02,
    Fault.OUTAGE: 0.001,
}
"""How often each happens to a request that it fits.

Bodies of requests are never damaged: no S3 client would be told, and nobody else has what a damaged
contribution would have said. TLS and the checksums of S3 are there for that.
"""


@dataclass
class Faults:
    """Chooses what happens to a request. Thread-safe.

    Attributes:
        chance: Where chance comes from.
        rates: How often each fault happens to a request that it fits.
        counts: How often each has happened.
        quiet: Whether nothing goes wrong for now.
    """

    chance: random.Random
    rates: dict[Fault, float] = field(default_factory=lambda: dict(RATES))
    counts: dict[str, int] = field(default_factory=dict)
    quiet: bool = False
    _down_until: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def choose(self, method: str, *, conditional: bool, listing: bool, probe: bool) -> Fault | None:
        """What happens to a request, if anything does.

        Args:
            method: Its method.
            conditional: Whether it writes only where there is nothing.
            listing: Whether it asks for a listing.
            probe: Whether a client tries with it whether the store keeps its promises: then
                listings must be fresh.
        """
        fitting = [Fault.ERROR, Fault.RESET, Fault.SLOW, Fault.OUTAGE]
        if method != "GET":
            fitting += [Fault.LOST, Fault.ERROR_AFTER]
        if conditional:
            fitting += [Fault.CONFLICT, Fault.EXISTS]
        if method == "GET":
            fitting += [Fault.TRUNCATED]
            if not listing:
                fitting += [Fault.FLIPPED]
            elif not probe:
                fitting += [Fault.STALE]
        with self._lock:
            if self.quiet:
                return None
            if time.monotonic() < self._down_until:
                return self.chance.choice([Fault.ERROR, Fault.RESET])
            at = self.chance.random()
            for fault in fitting:
                at -= self.rates.get(fault, 0.0)
                if at < 0:
                    if fault is Fault.OUTAGE:
                        self.counts["outage"] = self.counts.get("outage", 0) + 1
                        self._down_until = time.monotonic() + self.chance.uniform(
                            1, _LONGEST_OUTAGE
                        )
                        return Fault.ERROR
                    return fault
        return None

    def happened(self, fault: Fault) -> None:
        """Count it."""
        with self._lock:
            self.counts[fault.name.lower()] = self.counts.get(fault.name.lower(), 0) + 1

    def uniform(self, low: float, high: float) -> float:
        """A random number."""
        with self._lock:
            return self.chance.uniform(low, high)

    def below(self, bound: int) -> int:
        """A random whole number."""
        with self._lock:
            return self.chance.randrange(bound)

"""Limits on the calls per second."""

from __future__ import annotations

from collections.abc import Mapping

from ..._server._timeline import Timeline


class Rates:
    """A bucket per operation that has a rate.

    It holds the calls of one second, and at least one call.
    """

    def __init__(self, timeline: Timeline, rates: Mapping[str, float]) -> None:
        self._timeline = timeline
        self._rates = rates
        self._buckets: dict[str, tuple[float, float]] = {}

    def admit(self, operation: str) -> bool:
        """Return whether this call is let through."""
        rate = self._rates.get(operation)
        if rate is None:
            return True
        most = max(rate, 1.0)
        now = self._timeline.now()
        left, since = self._buckets.get(operation, (most, now))
        left = min(most, left + (now - since) * rate)
        allowed = left >= 1.0 - 1e-9
        self._buckets[operation] = (left - 1.0 if allowed else left, now)
        return allowed

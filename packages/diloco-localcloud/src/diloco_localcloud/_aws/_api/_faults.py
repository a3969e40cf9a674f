"""Faults and limits on rates that a test asks for, in AWS's words."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..._server._faults import Fault
from ..._server._timeline import Timeline
from .._model._refused import RefusedError, throttled

# All but ``forbidden``, whose message names the operation, and the faults that cut the connection,
# which send no message.
REFUSALS: Mapping[str, Callable[[Fault], RefusedError]] = {
    "throttle": lambda _: throttled(),
    "server_error": lambda _: RefusedError("InternalFailure", "Internal service error.", 500),
    "unavailable": lambda _: RefusedError("ServiceUnavailable", "Service is unavailable.", 503),
    "unauthorized": lambda _: RefusedError(
        "UnrecognizedClientException", "The security token included in the request is invalid."
    ),
    "expired": lambda _: RefusedError(
        "ExpiredTokenException", "The security token included in the request is expired"
    ),
}


def forbidden(caller: str, service: str, operation: str) -> RefusedError:
    """Return the refusal of a caller that has no right to an operation."""
    words = f"because no identity-based policy allows the {service}:{operation} action"
    who = f"User: {caller} is not authorized to perform: {service}:{operation}"
    return RefusedError("AccessDeniedException", f"{who} {words}")


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

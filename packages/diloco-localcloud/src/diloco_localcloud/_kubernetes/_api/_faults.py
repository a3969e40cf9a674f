"""Faults that a test asks for, in the words of the API server."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..._server._faults import Fault
from .._objects import _refusals

_TOO_OLD = (
    "The provided continue parameter is too old to display a consistent list result. You must "
    "start a new list without the continue parameter."
)

# All but ``forbidden``, whose message names the user and the objects, and the faults that cut the
# connection, which send no message.
REFUSALS: Mapping[str, Callable[[Fault], _refusals.ApiError]] = {
    "throttle": lambda fault: _refusals.too_many_requests(fault.seconds),
    "server_error": lambda _: _refusals.ApiError(
        500, "InternalError", "Internal error occurred: etcdserver: request timed out", {}
    ),
    "unavailable": lambda _: _refusals.ApiError(
        503, "ServiceUnavailable", "the server is currently unable to handle the request", {}
    ),
    "unauthorized": lambda _: _refusals.unauthorized(),
    "expired": lambda _: _refusals.gone(_TOO_OLD),
}

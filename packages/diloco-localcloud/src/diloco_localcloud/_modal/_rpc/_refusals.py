"""Refusals and faults in the words of gRPC."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..._server._faults import Fault
from .._workspace._refused import RefusedError

REFUSALS: Mapping[str, Callable[[Fault], RefusedError]] = {
    "throttle": lambda _: RefusedError("RESOURCE_EXHAUSTED", "Rate limit exceeded"),
    "server_error": lambda _: RefusedError("INTERNAL", "Internal error"),
    "unavailable": lambda _: RefusedError("UNAVAILABLE", "Service is unavailable"),
    "unauthorized": lambda _: RefusedError("UNAUTHENTICATED", "Token validation failed"),
    "forbidden": lambda _: RefusedError("PERMISSION_DENIED", "Permission denied"),
    "expired": lambda _: RefusedError("FAILED_PRECONDITION", "The request is no longer valid"),
}

#: The HTTP statuses that Google's APIs use for those of gRPC, for the list of calls.
HTTP = {
    "OK": 200,
    "INVALID_ARGUMENT": 400,
    "FAILED_PRECONDITION": 400,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404,
    "ALREADY_EXISTS": 409,
    "ABORTED": 409,
    "RESOURCE_EXHAUSTED": 429,
    "UNIMPLEMENTED": 501,
    "UNAVAILABLE": 503,
}

"""The API: from a request to an answer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from ..._server._faults import Call, Calls, Fault, Faults, before
from ..._server._http import CutError, Request, Response, as_json
from .._control._cluster import Cluster
from .._objects import _refusals
from . import _access, _discovery, _verbs

# The API server's own limit.
_MOST_BYTES = 3 << 20
_LOG = logging.getLogger("diloco_localcloud")
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


class Api:
    """Answers requests about a cluster; called from many threads."""

    def __init__(self, cluster: Cluster, access: _access.Access) -> None:
        self.access = access
        self.faults = Faults()
        self.calls = Calls()
        self._cluster = cluster
        self._verbs = _verbs.Verbs(cluster, access)

    def admit(self, head: Request) -> Response | None:
        """Return the refusal of a request without the token or with too large a body, or None."""
        try:
            size = int(head.headers.get("content-length", "0"))
            if size or head.path not in ("/healthz", "/livez", "/readyz", "/version"):
                self.access.authenticate(head.headers.get("authorization", ""))
            if size > _MOST_BYTES:
                raise _refusals.too_large(_MOST_BYTES)
        except _refusals.ApiError as refusal:
            route, verb, what, _ = self._meant(head)
            # It records nothing that an unknown sender has chosen.
            self.calls.note(Call(verb, "" if route is None else what, "", refusal.code))
            return as_json(refusal.code, refusal.body, refusal.headers)
        return None

    def _meant(self, request: Request) -> tuple[_access.Route | None, str, str, str]:
        """Return the route, the verb, the resource and the name."""
        route = _access.parse(request.path)
        if route is None or route.resource.api_version in self._cluster.absent:
            return None, request.method.lower(), request.path, ""
        return route, _verb(request, route), route.what, route.name

    def handle(self, request: Request) -> Response:
        """Answer a request that was admitted, or raise ``CutError``."""
        route, verb, what, name = self._meant(request)
        response: Response | None = None
        try:
            response = self._answer(request, route, verb, what)
            if verb in ("get", "list"):
                self._cluster.delays.answer_late()
        except CutError:
            raise
        except Exception as wrong:  # noqa: BLE001 - a server answers, whatever went wrong
            refusal = self._refusal(request, wrong)
            response = as_json(refusal.code, refusal.body, refusal.headers)
        finally:
            self.calls.note(Call(verb, what, name, 0 if response is None else response.status))
        return response

    def _refusal(self, request: Request, wrong: Exception) -> _refusals.ApiError:
        if isinstance(wrong, _refusals.ApiError):
            return wrong
        if isinstance(wrong, RecursionError):
            return _refusals.bad_request("json: exceeded max depth")
        _LOG.error("%s %s", request.method, request.path, exc_info=wrong)
        message = f"the stand-in has a fault: {type(wrong).__name__}: {wrong}"
        return _refusals.ApiError(500, "InternalError", message)

    def _answer(
        self, request: Request, route: _access.Route | None, verb: str, what: str
    ) -> Response:
        fault = self.faults.take(verb, what)
        before(fault, REFUSALS)
        if route is None:
            document = _discovery.answer(request, self._cluster.absent)
            if document is None:
                raise _refusals.no_such_path(request.method, request.path)
            return document
        if fault is not None and fault.kind == "forbidden":
            raise self.access.refusal(verb, route)
        self.access.check(verb, route)
        response = self._verbs.run(verb, request, route)
        if fault is not None and fault.kind == "ambiguous":
            raise CutError
        return response


def _verb(request: Request, route: _access.Route) -> str:
    if request.method in ("GET", "HEAD"):
        many = "watch" if request.flag("watch") else "list"
        return "get" if route.name else many
    if request.method == "DELETE":
        return "delete" if route.name else "deletecollection"
    verbs = {"POST": "create", "PUT": "update", "PATCH": "patch"}
    return verbs.get(request.method, request.method.lower())

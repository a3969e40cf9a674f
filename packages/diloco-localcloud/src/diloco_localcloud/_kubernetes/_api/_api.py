"""The API: from a request to an answer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from ..._server._faults import Call, Calls, Fault, Faults, before
from ..._server._http import CutError, Request, Response, as_json
from .._control._cluster import Cluster
from .._objects import _refusals
from . import _access, _discovery, _route, _verbs

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

    def _meant(self, request: Request) -> tuple[_route.Route | None, str, str, str]:
        """Return the route, the verb, the resource and the name."""
        route = _route.parse(request.path)
        if route is not None and route.resource.api_version in self._cluster.absent:
            route = None
        verb = _verb(request, route)
        if route is None:
            return None, verb, request.path, ""
        what = route.resource.plural + (f"/{route.subresource}" if route.subresource else "")
        return route, verb, what, route.name

    def handle(self, request: Request) -> Response:
        """Answer a request that was admitted, or raise ``CutError``."""
        route, verb, what, name = self._meant(request)
        status = 0
        try:
            response = self._answer(request, route, verb, what)
            status = response.status
            if verb in ("get", "list"):
                self._cluster.delays.answer_late()
        except _refusals.ApiError as refusal:
            status = refusal.code
            return as_json(refusal.code, refusal.body, refusal.headers)
        except CutError:
            raise
        except RecursionError:
            status = 400
            return as_json(400, _refusals.bad_request("json: exceeded max depth").body)
        except Exception as wrong:  # noqa: BLE001 - a server answers, whatever went wrong
            _LOG.exception("%s %s", request.method, request.path)
            status = 500
            message = f"the stand-in has a fault: {type(wrong).__name__}: {wrong}"
            return as_json(500, _refusals.ApiError(500, "InternalError", message).body)
        finally:
            self.calls.note(Call(verb, what, name, status))
        return response

    def _answer(
        self, request: Request, route: _route.Route | None, verb: str, what: str
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


def _verb(request: Request, route: _route.Route | None) -> str:
    if route is None:
        return request.method.lower()
    if request.method in ("GET", "HEAD"):
        if route.name:
            return "get"
        return "watch" if request.flag("watch") else "list"
    if request.method == "DELETE":
        return "delete" if route.name else "deletecollection"
    return {"POST": "create", "PUT": "update", "PATCH": "patch"}.get(
        request.method, request.method.lower()
    )

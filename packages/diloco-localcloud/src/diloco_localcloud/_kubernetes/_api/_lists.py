"""Reads: one object, lists and watches."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

from ..._server._http import Request, Response, as_json
from .._control._cluster import Cluster
from .._objects import _refusals
from .._objects._resources import Resource
from .._objects._store import Change, Store
from . import _query, _tables
from ._access import Route

Json = dict[str, Any]

# The seconds for which a watch without timeoutSeconds is kept open.
WATCH_SECONDS = 1800.0
# The seconds between two looks of an open watch at whether its server was stopped.
_LOOK_SECONDS = 0.5


def one(request: Request, route: Route, obj: Json) -> Response:
    """Return the answer to a GET of an object."""
    if _tables.wanted(request):
        meta = {"resourceVersion": obj["metadata"]["resourceVersion"]}
        return as_json(200, _tables.table(route.resource, [obj], meta))
    return as_json(200, obj)


def listed(store: Store, request: Request, route: Route) -> Response:
    """Return the answer to a GET of a collection; under the lock.

    Like real ones, the items of a list carry neither kind nor apiVersion.
    """
    resource, items = route.resource, chosen(store, request, route)
    limit = _query.whole(request.query, "limit") or 0
    items, meta = _query.page(items, limit, request.query.get("continue", ""), store.version)
    if _tables.wanted(request):
        return as_json(200, _tables.table(resource, items, meta))
    bare = [
        {key: value for key, value in item.items() if key not in ("kind", "apiVersion")}
        for item in items
    ]
    kind = {"kind": f"{resource.kind}List", "apiVersion": resource.api_version}
    return as_json(200, {**kind, "metadata": meta, "items": bare})


def chosen(store: Store, request: Request, route: Route) -> list[Json]:
    """Return the objects of a collection that its selectors choose."""
    test = _test(request, route)
    return [obj for obj in store.list(route.resource, route.namespace) if test(obj)]


def _test(request: Request, route: Route) -> Callable[[Json], bool]:
    labels = _query.by_labels(request.query.get("labelSelector", ""))
    fields = _query.by_fields(request.query.get("fieldSelector", ""), route.resource.kind)

    def test(obj: Json) -> bool:
        inside = not route.namespace or obj["metadata"].get("namespace") == route.namespace
        return inside and labels(obj) and fields(obj)

    return test


def watched(cluster: Cluster, request: Request, route: Route) -> Response:
    """Return the answer to a GET with ``watch=true``; under the lock.

    Without a resource version it begins with the objects that exist.
    """
    store, since = cluster.store, request.query.get("resourceVersion", "")
    initial: list[Json] = []
    start = store.version
    if request.flag("sendInitialEvents"):  # clients then list first
        words = (
            "sendInitialEvents is forbidden for watch unless the WatchList feature gate is enabled"
        )
        problem = ("sendInitialEvents", "FieldValueForbidden", f"Forbidden: {words}")
        raise _refusals.invalid(Resource("", "ListOptions", "meta.k8s.io"), "", [problem])
    if since in ("", "0"):
        initial = [{"type": "ADDED", "object": obj} for obj in chosen(store, request, route)]
    elif not since.isascii() or not since.isdigit() or len(since) > 19:
        raise _refusals.bad_request(f'invalid resource version "{since}"')
    else:
        start = int(since)
        oldest = store.changes[0].version if store.changes else store.version + 1
        if start < oldest - 1 and len(store.changes) == store.changes.maxlen:
            raise _refusals.gone(f"too old resource version: {start} ({oldest})")
    end = time.monotonic() + (_query.whole(request.query, "timeoutSeconds") or WATCH_SECONDS)
    test, table = _test(request, route), _tables.wanted(request)

    def stream() -> Iterator[bytes]:
        for event in _events(cluster, route.resource, test, initial, start, end):
            if table:
                rows = _tables.table(route.resource, [event["object"]], {})
                event = {**event, "object": rows}
            yield json.dumps(event, separators=(",", ":")).encode() + b"\n"

    return Response(200, stream())


def _events(
    cluster: Cluster,
    resource: Resource,
    test: Callable[[Json], bool],
    initial: list[Json],
    seen: int,
    end: float,
) -> Iterator[Json]:
    """Yield the first events, and those of the changes after a version, until a moment."""
    yield from initial
    while True:
        with cluster.changed:
            while not (fresh := _since(cluster.store, seen)):
                left = end - time.monotonic()
                if left <= 0 or cluster.stopped:
                    return
                cluster.changed.wait(min(left, _LOOK_SECONDS))
        seen = fresh[-1].version
        yield from filter(None, (_seen(change, resource, test) for change in fresh))


def _since(store: Store, version: int) -> list[Change]:
    fresh = []
    for change in reversed(store.changes):
        if change.version <= version:
            break
        fresh.append(change)
    return fresh[::-1]


def _seen(change: Change, resource: Resource, test: Callable[[Json], bool]) -> Json | None:
    """Return the event of a change for this watch; leaving its selection counts as DELETED."""
    if change.resource is not resource:
        return None
    before = change.old if change.old is not None and test(change.old) else None
    after = change.new if change.new is not None and test(change.new) else None
    if after is not None:
        return {"type": "MODIFIED" if before else "ADDED", "object": after}
    if before is not None:
        meta = {**before["metadata"], "resourceVersion": str(change.version)}
        return {"type": "DELETED", "object": {**before, "metadata": meta}}
    return None

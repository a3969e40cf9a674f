"""Deletes and evictions."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from .._objects import _refusals, _resources
from .._pods import _states
from . import _protobuf
from ._checks import _shape
from ._numbers import whole

if TYPE_CHECKING:
    from ..._server._http import Request
    from .._control._cluster import Cluster
    from ._route import Route

Json = dict[str, Any]


def one(cluster: Cluster, request: Request, route: Route) -> Json:
    """Delete one object, as DELETE does; under the lock.

    Raises:
        ApiError: 404, 409 for a precondition, 422 for a wrong policy.
    """
    options = _options(request)
    resource = route.resource
    obj = cluster.store.get(resource, route.namespace, route.name)
    _check_preconditions(route, obj, options.get("preconditions") or {})
    if options.get("dryRun"):
        return obj
    return _delete(cluster, route, obj, options)


def evict(cluster: Cluster, route: Route) -> Json:
    """Evict a pod, as a POST to its eviction does."""
    pod = cluster.store.get(_resources.PODS, route.namespace, route.name)
    now = cluster.timeline.stamp()
    cluster.put_pod(_states.disrupted(pod, "EvictionByEvictionAPI", "Eviction API: evicting", now))
    cluster.delete_pod(route.namespace, route.name)
    return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201}


def _delete(cluster: Cluster, route: Route, obj: Json, options: Json) -> Json:
    resource, meta = route.resource, obj["metadata"]
    namespace, name = meta.get("namespace", ""), meta["name"]
    removed = _refusals.success(resource.plural, resource.group, name, meta["uid"])
    if resource is _resources.JOBS:
        last = cluster.delete_job(namespace, name, _policy(options))
        return removed if cluster.store.find(resource, namespace, name) is None else last
    if resource is _resources.PODS:
        return cluster.delete_pod(namespace, name, options.get("gracePeriodSeconds")) or obj
    if resource is _resources.NAMESPACES:
        return _terminating(cluster, obj)
    cluster.store.remove(resource, namespace, name)
    return removed


def _terminating(cluster: Cluster, namespace: Json) -> Json:
    """Mark a namespace as deleted, and return it; the namespace controller does the rest."""
    if "deletionTimestamp" in namespace["metadata"]:
        return namespace
    meta = {**namespace["metadata"], "deletionTimestamp": cluster.timeline.stamp()}
    new = {**namespace, "metadata": meta, "status": {"phase": "Terminating"}}
    cluster.store.replace(_resources.NAMESPACES, new, keep=True)
    return new


def _policy(options: Json) -> str:
    policy = options.get("propagationPolicy")
    if policy is None:
        orphan = options.get("orphanDependents")
        # The default of batch/v1, which lets the pods keep running.
        return "Background" if orphan is False else "Orphan"
    return str(policy)


def _options(request: Request) -> Json:
    options: Json = {}
    if request.body:
        if request.headers.get("content-type", "").startswith(_protobuf.MEDIA_TYPE):
            body = _protobuf.decode(request.body)
        else:
            try:
                body = json.loads(request.body)
            except ValueError as wrong:
                raise _refusals.bad_request(f"json parse error: {wrong}") from None
        options = _shape.decode("DeleteOptions", {} if body is None else body)
    for key in ("propagationPolicy", "dryRun"):
        if key in request.query:
            options[key] = request.query[key]
    grace = whole(request.query, "gracePeriodSeconds")
    if grace is not None:
        options["gracePeriodSeconds"] = grace
    if "orphanDependents" in request.query:
        options["orphanDependents"] = request.flag("orphanDependents")
    policy = options.get("propagationPolicy")
    if policy not in (None, "Background", "Foreground", "Orphan"):
        words = (
            f'Unsupported value: "{policy}": supported values: "Background", "Foreground", "Orphan"'
        )
        causes = [("propagationPolicy", "FieldValueNotSupported", words)]
        raise _refusals.invalid("DeleteOptions", "meta.k8s.io", "", causes)
    return options


def _check_preconditions(route: Route, obj: Json, wanted: Json) -> None:
    meta, resource = obj["metadata"], route.resource
    for field, words in (("uid", "UID"), ("resourceVersion", "ResourceVersion")):
        if wanted.get(field) not in (None, meta[field]):
            cause = (
                f"Precondition failed: {words} in precondition: {wanted[field]}, "
                f"{words} in object meta: {meta[field]}"
            )
            raise _refusals.conflict(resource.plural, resource.group, route.name, cause)

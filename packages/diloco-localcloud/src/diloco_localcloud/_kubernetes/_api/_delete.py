"""Deletes and evictions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..._server._http import Request
from .._control._cluster import Cluster
from .._objects import _refusals, _resources
from ._access import Route
from ._checks import _names, _shape
from ._query import whole

Json = dict[str, Any]

_OPTIONS = _resources.Resource("", "DeleteOptions", "meta.k8s.io")
_POLICIES = ["Background", "Foreground", "Orphan"]


def one(cluster: Cluster, request: Request, route: Route, body: Json) -> Json:
    """Delete one object, as DELETE with this body does; under the lock.

    Raises:
        ApiError: 404, 409 for a precondition, 422 for a wrong policy.
    """
    options = _options(request.query, body)
    resource = route.resource
    obj = cluster.store.get(resource, route.namespace, route.name)
    _check_preconditions(route, obj, options.get("preconditions") or {})
    if options.get("dryRun"):
        return obj
    return _delete(cluster, route, obj, options)


def evict(cluster: Cluster, route: Route, body: Json) -> Json:
    """Evict a pod, as a POST of this body to its eviction does."""
    options = _options({}, body.get("deleteOptions") or {})
    pod = cluster.store.get(_resources.PODS, route.namespace, route.name)
    if not options.get("dryRun"):
        grace = options.get("gracePeriodSeconds")
        cluster.disrupt(pod, "EvictionByEvictionAPI", "Eviction API: evicting", grace)
    return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201}


def _delete(cluster: Cluster, route: Route, obj: Json, options: Json) -> Json:
    resource, meta = route.resource, obj["metadata"]
    namespace, name = meta.get("namespace", ""), meta["name"]
    removed = _refusals.success(resource, name, meta["uid"])
    if resource is _resources.JOBS:
        last = cluster.delete_job(namespace, name, options["propagationPolicy"])
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


def _options(query: Mapping[str, str], body: Json) -> Json:
    """Return the options that a body and a query name, the latter first."""
    options = _shape.decode("DeleteOptions", body)
    options |= {key: query[key] for key in ("propagationPolicy", "dryRun") if key in query}
    grace = whole(query, "gracePeriodSeconds")
    if grace is not None:
        options["gracePeriodSeconds"] = grace
    policy = options.get("propagationPolicy", "Orphan")  # the default of batch/v1: pods go on
    problems = []
    if policy not in _POLICIES:
        problems.append(_names.not_supported("propagationPolicy", policy, _POLICIES))
    if "orphanDependents" in {*options, *query}:
        words = "the stand-in serves propagationPolicy in its place"
        problems.append(_names.forbidden("orphanDependents", words))
    if problems:
        raise _refusals.invalid(_OPTIONS, "", problems)
    return {**options, "propagationPolicy": policy}


def _check_preconditions(route: Route, obj: Json, wanted: Json) -> None:
    meta = obj["metadata"]
    for field, words in (("uid", "UID"), ("resourceVersion", "ResourceVersion")):
        if wanted.get(field) not in (None, meta[field]):
            cause = failed(words, wanted[field], meta[field])
            raise _refusals.conflict(route.resource, route.name, cause)


def failed(words: str, wanted: str, value: str) -> str:
    """Return how the server words a precondition that failed."""
    condition = f"{words} in precondition: {wanted}"
    return f"Precondition failed: {condition}, {words} in object meta: {value}"

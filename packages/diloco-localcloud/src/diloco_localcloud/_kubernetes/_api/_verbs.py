"""The effects of the verbs on the objects."""

from __future__ import annotations

import copy
import json
from typing import Any

from ..._server._http import Request, Response, as_json
from .._admission import _admit
from .._control._cluster import Cluster
from .._objects import _refusals, _resources
from .._objects._resources import Resource
from . import _delete, _exec, _lists, _patch, _protobuf
from ._access import Access, Route
from ._checks import _names, _shape, _specs
from ._logs import serve as serve_log

Json = dict[str, Any]


class Verbs:
    """Carries out calls that are allowed; takes the cluster's lock."""

    def __init__(self, cluster: Cluster, access: Access) -> None:
        self._cluster = cluster
        self._access = access

    def run(self, verb: str, request: Request, route: Route) -> Response:
        """Answer one call.

        Raises:
            ApiError: the call is refused.
        """
        resource = route.resource
        if verb not in resource.verbs:
            raise _refusals.method_not_allowed()
        if route.subresource == "log":
            return serve_log(self._cluster, request, route)
        if route.subresource == "exec":
            return _exec.serve(self._cluster, request, route)
        with self._cluster.changed:
            store = self._cluster.store
            if verb == "list":
                return _lists.listed(store, request, route)
            if verb == "watch":
                return _lists.watched(self._cluster, request, route)
            if verb == "get":
                return _lists.one(request, route, store.get(resource, route.namespace, route.name))
            if verb == "create":
                warnings: list[str] = []
                return as_json(201, self._create(request, route, warnings), _warning(warnings))
            if verb == "patch":
                return as_json(200, self._change(request, route))
            return as_json(200, _delete.one(self._cluster, request, route, _body(request)))

    def _create(self, request: Request, route: Route, warnings: list[str]) -> Json:
        resource, body = route.resource, _body(request)
        if resource is _resources.ACCESS_REVIEWS:
            return self._review(body)
        if route.subresource == "eviction":
            return _delete.evict(self._cluster, route, body)
        if route.name:
            raise _refusals.method_not_allowed()
        _check_kind(resource, body)
        body = _shape.decode(resource.kind, body)
        store = self._cluster.store
        if not isinstance(body.get("metadata"), dict):
            raise _refusals.bad_request("the object has no metadata")
        if resource.namespaced:
            namespace = self._namespace(route, body)
            body = {**body, "metadata": {**body["metadata"], "namespace": namespace}}
        new = store.prepare(resource, body)
        _check(resource, new)
        if resource is _resources.JOBS:
            new = _specs.new_job(self._cluster.admission(new))
            spec = new["spec"]["template"]["spec"]
            warnings += _admit.warnings(store, new["metadata"]["namespace"], spec)
        elif resource is _resources.PODS:
            new = self._pod(new)
        if _dry(request):
            old = store.find(resource, route.namespace, new["metadata"]["name"])
            if old is not None:
                raise _refusals.already_exists(resource, new["metadata"]["name"])
            return new
        if resource is _resources.NAMESPACES:
            return self._cluster.add_namespace(body)
        return store.add(resource, new)

    def _review(self, body: Json) -> Json:
        """Return a SelfSubjectAccessReview with its status."""
        wanted = (body.get("spec") or {}).get("resourceAttributes") or {}
        verb, group, plural, name, part = (
            wanted.get(key, "") for key in ("verb", "group", "resource", "name", "subresource")
        )
        what = f"{plural}/{part}" if part else plural
        allowed = self._access.allows(verb, group, what, name)
        kind = {"kind": "SelfSubjectAccessReview", "apiVersion": "authorization.k8s.io/v1"}
        return {**kind, "metadata": {}, **body, "status": {"allowed": allowed}}

    def _namespace(self, route: Route, body: Json) -> str:
        namespace = body["metadata"].get("namespace") or route.namespace
        if not route.namespace:
            raise _refusals.method_not_allowed()
        if namespace != route.namespace:
            words = f"the namespace sent on the request ({namespace} != {route.namespace})"
            raise _refusals.bad_request(
                f"the namespace of the provided object does not match {words}"
            )
        entry = self._cluster.store.find(_resources.NAMESPACES, "", route.namespace)
        if entry is None:
            raise _refusals.not_found(_resources.NAMESPACES, route.namespace)
        if "deletionTimestamp" in entry["metadata"]:
            name, resource = body["metadata"].get("name", ""), route.resource
            raise _refusals.being_terminated(resource, name, route.namespace)
        return route.namespace

    def _pod(self, new: Json) -> Json:
        spec = _specs.pod_with_defaults(new.get("spec") or {})
        spec.setdefault("serviceAccountName", "default")
        problems = [*_specs.pod_causes(spec, "spec")]
        if problems:
            raise _refusals.invalid(_resources.PODS, new["metadata"]["name"], problems)
        new = {**new, "spec": spec, "status": {"phase": "Pending", "qosClass": "BestEffort"}}
        return _admit.admit(self._cluster.store, new)

    def _change(self, request: Request, route: Route) -> Json:
        resource, store = route.resource, self._cluster.store
        old = store.get(resource, route.namespace, route.name)
        kind = request.headers.get("content-type", "").partition(";")[0].strip()
        new = _patch.apply(kind, copy.deepcopy(old), request.body)
        _check_kind(resource, new)
        new = _shape.decode(resource.kind, new)
        meta = dict(new.get("metadata") or {})
        version = meta.get("resourceVersion")
        if version and version != old["metadata"]["resourceVersion"]:
            raise _refusals.conflict(resource, route.name)
        if meta.get("uid") not in (None, "", old["metadata"]["uid"]):
            cause = _delete.failed("UID", meta["uid"], old["metadata"]["uid"])
            raise _refusals.conflict(resource, route.name, cause)
        new = {**new, "metadata": _kept(old["metadata"], meta)}
        new = self._allowed(resource, route, old, new)
        if _dry(request):
            return new
        store.replace(resource, new)
        return store.find(resource, route.namespace, route.name) or new

    def _allowed(self, resource: Resource, route: Route, old: Json, new: Json) -> Json:
        _check(resource, new)
        if "status" in old:
            new = {**new, "status": old["status"]}
        if resource is _resources.JOBS:
            return _specs.changed_job(old, new)
        if resource is _resources.PODS and new.get("spec") != old["spec"]:
            words = "the stand-in does not change the spec of a pod"
            raise _refusals.invalid(_resources.PODS, route.name, [_names.forbidden("spec", words)])
        return new


def _check(resource: Resource, obj: Json) -> None:
    """Refuse an object of which a part is wrong that objects of other kinds have, too."""
    problems = [*_names.metadata(obj["metadata"], label=resource is _resources.NAMESPACES)]
    if resource in (_resources.CONFIG_MAPS, _resources.SECRETS):
        problems += _names.data_keys(obj)
    elif resource is _resources.LIMIT_RANGES:
        problems += _names.limits(obj)
    if problems:
        raise _refusals.invalid(resource, obj["metadata"].get("name", ""), problems)


_KEPT = (
    "name namespace uid creationTimestamp generation deletionTimestamp deletionGracePeriodSeconds"
)


def _kept(old: Json, new: Json) -> Json:
    """Return the new metadata with the old values of the fields that a client cannot change."""
    meta = {key: value for key, value in new.items() if value is not None}
    for field in _KEPT.split():
        meta.pop(field, None)
        if field in old:
            meta[field] = old[field]
    meta["resourceVersion"] = old["resourceVersion"]
    return meta


def _dry(request: Request) -> bool:
    value = request.query.get("dryRun")
    if value not in (None, "", "All"):
        unsupported = f'Unsupported value: "{value}": supported values: "All"'
        message = f'Invalid value: [ "{value}" ]: {unsupported}'
        raise _refusals.ApiError(422, "Invalid", message, {})
    return value == "All"


def _warning(warnings: list[str]) -> dict[str, str]:
    texts = [words.replace("\\", "\\\\").replace('"', '\\"') for words in warnings]
    return {"Warning": ", ".join(f'299 - "{text}"' for text in texts)} if texts else {}


def _check_kind(resource: Resource, body: Json) -> None:
    kind, version = body.get("kind", resource.kind), body.get("apiVersion", resource.api_version)
    if kind != resource.kind or version != resource.api_version:
        raise _refusals.bad_request(
            f"{kind} in version {json.dumps(version)} cannot be handled as a {resource.kind}: no "
            f"kind {json.dumps(kind)} is registered for version {json.dumps(version)}"
        )


def _body(request: Request) -> Json:
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip()
    if kind == _protobuf.MEDIA_TYPE:
        return _protobuf.decode(request.body)
    if kind not in ("application/json", ""):
        raise _refusals.unsupported_media_type(["application/json"])
    try:
        body = json.loads(request.body or b"{}")
    except ValueError as wrong:
        words = f"couldn't get version/kind; json parse error: {wrong}"
        raise _refusals.bad_request(words) from None
    if not isinstance(body, dict):
        raise _refusals.bad_request("the object provided is unrecognized: it must be an object")
    return body

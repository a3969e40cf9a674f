"""The documents that list the available APIs."""

from __future__ import annotations

from typing import Any

from ..._server._http import Request, Response, as_json
from .._objects import _resources
from . import _openapi

Json = dict[str, Any]

VERSION = {
    "major": "1",
    "minor": "34",
    "gitVersion": "v1.34.0-diloco",
    "gitCommit": "",
    "gitTreeState": "clean",
    "buildDate": "2026-01-01T00:00:00Z",
    "goVersion": "",
    "compiler": "",
    "platform": "stand-in",
}

_SUBRESOURCE_VERBS = {"log": ["get"], "eviction": ["create"], "exec": ["create", "get"]}


def answer(request: Request, absent: set[str]) -> Response | None:
    """Return the answer for a path that names no objects; None if there is none.

    It lists all API groups except the ``absent`` versions.
    """
    if request.method not in ("GET", "HEAD"):
        return None
    path = request.path.rstrip("/")
    groups = sorted(
        {
            (resource.group, resource.version)
            for resource in _resources.ALL
            if resource.group and resource.api_version not in absent
        }
    )
    if path in ("/healthz", "/livez", "/readyz"):
        return Response(200, b"ok", "text/plain")
    if path.startswith("/openapi"):
        document = _openapi.answer(path)
        return None if document is None else as_json(200, document)
    if path == "/version":
        return as_json(200, VERSION)
    if path == "/api":
        return as_json(
            200, {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []}
        )
    if path == "/apis":
        return as_json(
            200,
            {
                "kind": "APIGroupList",
                "apiVersion": "v1",
                "groups": [_group(*group) for group in groups],
            },
        )
    if path == "/api/v1":
        return as_json(200, _listed("", "v1"))
    for name, version in groups:
        if path == f"/apis/{name}":
            return as_json(200, {"kind": "APIGroup", "apiVersion": "v1", **_group(name, version)})
        if path == f"/apis/{name}/{version}":
            return as_json(200, _listed(name, version))
    return None


def _group(name: str, version: str) -> Json:
    served = {"groupVersion": f"{name}/{version}", "version": version}
    return {"name": name, "versions": [served], "preferredVersion": served}


def _listed(group: str, version: str) -> Json:
    resources: list[Json] = []
    for resource in _resources.ALL:
        if resource.group != group:
            continue
        base = {
            "singularName": resource.singular,
            "namespaced": resource.namespaced,
            "kind": resource.kind,
        }
        short = {"shortNames": list(resource.short)} if resource.short else {}
        categories = {"categories": ["all"]} if resource.plural in ("pods", "jobs") else {}
        resources.append(
            {"name": resource.plural, **base, "verbs": list(resource.verbs), **short, **categories}
        )
        for sub in resource.subresources:
            verbs = _SUBRESOURCE_VERBS[sub]
            kind = {"eviction": "Eviction", "exec": "PodExecOptions"}.get(sub, resource.kind)
            extra = {"group": "policy", "version": "v1"} if sub == "eviction" else {}
            entry = {**base, "singularName": "", "kind": kind, **extra}
            resources.append({"name": f"{resource.plural}/{sub}", **entry, "verbs": verbs})
    full = f"{group}/{version}" if group else version
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": full,
        "resources": resources,
    }

"""The documents that list the available APIs, and tell kubectl that the server checks fields."""

from __future__ import annotations

from collections import ChainMap
from typing import Any

from ..._server._http import Request, Response, as_json
from .._objects import _resources
from .._objects._resources import Resource

Json = dict[str, Any]

VERSION = {
    **dict.fromkeys(("gitCommit", "goVersion", "compiler"), ""),
    "major": "1",
    "minor": "34",
    "gitVersion": "v1.34.0-diloco",
    "gitTreeState": "clean",
    "buildDate": "2026-01-01T00:00:00Z",
    "platform": "stand-in",
}

# What the list of resources says of a subresource: its verbs, its kind, and a group of its own.
_SUBRESOURCES: dict[str, Json] = {
    "log": {"verbs": ["get"]},
    "eviction": {"verbs": ["create"], "kind": "Eviction", "group": "policy", "version": "v1"},
    "exec": {"verbs": ["create", "get"], "kind": "PodExecOptions"},
}
_PARAMETERS = [
    {"name": name, "in": "query", "schema": {"type": "string", "uniqueItems": True}}
    for name in ("dryRun", "fieldManager", "fieldValidation")
]


def answer(request: Request, absent: set[str]) -> Response | None:
    """Return the answer for a path that names no objects; None if there is none.

    It lists all API groups except the ``absent`` versions.
    """
    path = request.path.rstrip("/")
    if request.method not in ("GET", "HEAD"):
        return None
    if path in ("/healthz", "/livez", "/readyz"):
        return Response(200, b"ok", "text/plain")
    document = _documents(absent).get(path)
    return None if document is None else as_json(200, document)


def _documents(absent: set[str]) -> dict[str, Json]:
    """Return every document by its path."""
    groups: dict[tuple[str, str], list[Resource]] = {}
    for resource in _resources.ALL:
        if resource.api_version not in absent:
            groups.setdefault((resource.group, resource.version), []).append(resource)
    named = [_group(*key) for key in groups if key[0]]
    documents: dict[str, Json] = {
        "/version": VERSION,
        "/api": {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []},
        "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": named},
    }
    for entry in named:
        documents[f"/apis/{entry['name']}"] = {"kind": "APIGroup", "apiVersion": "v1", **entry}
    folders = {}
    for (group, version), resources in groups.items():
        folder = f"apis/{group}/{version}" if group else f"api/{version}"
        documents[f"/{folder}"] = {
            "kind": "APIResourceList",
            "apiVersion": "v1",
            "groupVersion": resources[0].api_version,
            "resources": [entry for resource in resources for entry in _entries(resource)],
        }
        documents[f"/openapi/v3/{folder}"] = {
            "openapi": "3.0.0",
            "info": {"title": "Kubernetes", "version": VERSION["gitVersion"]},
            "paths": dict(ChainMap(*(_paths(folder, kind) for kind in resources))),
            "components": {"schemas": {}},
        }
        folders[folder] = {"serverRelativeURL": f"/openapi/v3/{folder}?hash=1"}
    documents["/openapi/v3"] = {"paths": folders}
    return documents


def _group(name: str, version: str) -> Json:
    served = {"groupVersion": f"{name}/{version}", "version": version}
    return {"name": name, "versions": [served], "preferredVersion": served}


def _entries(resource: Resource) -> list[Json]:
    """Return the entries of a kind and of its subresources."""
    base = {"namespaced": resource.namespaced, "kind": resource.kind, "singularName": ""}
    whole: Json = {"name": resource.plural, **base, "singularName": resource.singular}
    whole |= {"verbs": list(resource.verbs), "shortNames": list(resource.short)}
    if resource in (_resources.PODS, _resources.JOBS):
        whole["categories"] = ["all"]
    parts = [
        {"name": f"{resource.plural}/{name}", **base, **_SUBRESOURCES[name]}
        for name in resource.subresources
    ]
    return [whole, *parts]


def _paths(folder: str, resource: Resource) -> Json:
    """Return just enough of OpenAPI for kubectl to learn that the server itself checks fields."""
    where = f"/{folder}/namespaces/{{namespace}}" if resource.namespaced else f"/{folder}"
    kind = {"group": resource.group, "version": resource.version, "kind": resource.kind}

    def operation(action: str) -> Json:
        return {
            "operationId": f"{action}{resource.kind}",
            "parameters": _PARAMETERS,
            "responses": {"200": {"description": "OK"}},
            "x-kubernetes-action": action,
            "x-kubernetes-group-version-kind": kind,
        }

    one = {action: operation(action) for action in ("patch", "put")}
    return {
        f"{where}/{resource.plural}": {"post": operation("post")},
        f"{where}/{resource.plural}/{{name}}": one,
    }

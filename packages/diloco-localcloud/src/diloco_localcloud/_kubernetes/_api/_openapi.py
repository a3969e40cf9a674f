"""Just enough OpenAPI for kubectl to learn that the server itself validates fields."""

from __future__ import annotations

from typing import Any

from .._objects import _resources
from .._objects._resources import Resource

Json = dict[str, Any]

_PARAMETERS = [
    {"name": name, "in": "query", "schema": {"type": "string", "uniqueItems": True}}
    for name in ("dryRun", "fieldManager", "fieldValidation")
]


def answer(path: str) -> Json | None:
    """Return the document of a path below ``/openapi``; None if there is no such document."""
    folders = {_folder(resource): resource.group for resource in _resources.ALL}
    if path == "/openapi/v3":
        return {
            "paths": {
                folder: {"serverRelativeURL": f"/openapi/v3/{folder}?hash=1"} for folder in folders
            }
        }
    folder = path.removeprefix("/openapi/v3/")
    if folder not in folders:
        return None
    paths: Json = {}
    for resource in _resources.ALL:
        if resource.group == folders[folder]:
            paths |= _paths(folder, resource)
    info = {"title": "Kubernetes", "version": "v1.34.0-diloco"}
    return {"openapi": "3.0.0", "info": info, "paths": paths, "components": {"schemas": {}}}


def _folder(resource: Resource) -> str:
    return (
        f"apis/{resource.group}/{resource.version}" if resource.group else f"api/{resource.version}"
    )


def _paths(folder: str, resource: Resource) -> Json:
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

    return {
        f"{where}/{resource.plural}": {"post": operation("post")},
        f"{where}/{resource.plural}/{{name}}": {
            "patch": operation("patch"),
            "put": operation("put"),
        },
    }

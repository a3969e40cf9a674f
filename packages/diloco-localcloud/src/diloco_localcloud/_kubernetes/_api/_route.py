"""Paths of the API."""

from __future__ import annotations

from dataclasses import dataclass

from .._objects import _resources
from .._objects._resources import Resource


@dataclass(frozen=True)
class Route:
    """The objects that a path names."""

    resource: Resource
    namespace: str = ""
    name: str = ""
    subresource: str = ""


def parse(path: str) -> Route | None:
    """Return the objects that a path names; None if it names none.

    Paths are ``/api/v1/namespaces/a/pods/b/log`` and the like; ``/apis/<group>/<version>/…`` for
    named groups.
    """
    steps = [step for step in path.split("/") if step]
    if steps[:1] == ["api"] and len(steps) >= 3:
        group, version, steps = "", steps[1], steps[2:]
    elif steps[:1] == ["apis"] and len(steps) >= 4:
        group, version, steps = steps[1], steps[2], steps[3:]
    else:
        return None
    namespace = ""
    if steps[0] == "namespaces" and len(steps) >= 3 and _resources.find(group, version, steps[2]):
        namespace, steps = steps[1], steps[2:]
    resource = _resources.find(group, version, steps[0])
    if resource is None or len(steps) > 3 or (namespace and not resource.namespaced):
        return None
    subresource = steps[2] if len(steps) > 2 else ""
    if subresource and subresource not in resource.subresources:
        return None
    return Route(resource, namespace, steps[1] if len(steps) > 1 else "", subresource)

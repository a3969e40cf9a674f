"""LimitRange: defaults for containers, and bounds on the resources that each asks for."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from .._objects._quantities import quantity
from ._refused import RefusedError

Json = dict[str, Any]


def with_defaults(ranges: list[Json], pod: Json) -> Json:
    """Return the pod with defaults for the limits and requests that its containers lack."""
    items = [item for item in _items(ranges) if item.get("type") == "Container"]
    if not items:
        return pod
    pod = copy.deepcopy(pod)
    for container in pod["spec"]["containers"]:
        resources = container.setdefault("resources", {})
        for item in items:
            for field, default in (("limits", "default"), ("requests", "defaultRequest")):
                for name, amount in (item.get(default) or {}).items():
                    resources.setdefault(field, {}).setdefault(name, amount)
    return pod


def check(ranges: list[Json], pod: Json) -> None:
    """Refuse a pod that asks for too much or too little.

    Raises:
        RefusedError: with everything that is wrong.
    """
    problems: list[str] = []
    for item in _items(ranges):
        if item.get("type") == "Container":
            for container in pod["spec"]["containers"]:
                problems += _wrong(item, container.get("resources") or {}, "Container")
    if problems:
        raise RefusedError(problems[0] if len(problems) == 1 else f"[{', '.join(problems)}]")


def _items(ranges: list[Json]) -> Iterator[Json]:
    for limit_range in ranges:
        yield from limit_range["spec"].get("limits") or []


def _wrong(item: Json, resources: Json, kind: str) -> Iterator[str]:
    requests, limits = resources.get("requests") or {}, resources.get("limits") or {}
    for name, least in sorted((item.get("min") or {}).items()):
        request = requests.get(name)
        if request is None:
            yield f"minimum {name} usage per {kind} is {least}.  No request is specified"
        elif quantity(request) < quantity(least):
            yield f"minimum {name} usage per {kind} is {least}, but request is {request}"
    for name, most in sorted((item.get("max") or {}).items()):
        limit = limits.get(name)
        if limit is None:
            yield f"maximum {name} usage per {kind} is {most}.  No limit is specified"
        elif quantity(limit) > quantity(most):
            yield f"maximum {name} usage per {kind} is {most}, but limit is {limit}"

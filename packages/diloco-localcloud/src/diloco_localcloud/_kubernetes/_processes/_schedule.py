"""Whether the node has room: by the resources that it declares."""

from __future__ import annotations

from typing import Any

from .._objects._quantities import quantity
from .._pods import _facts

Json = dict[str, Any]


def why_not(node: Json, pods: list[Json], pod: Json) -> str | None:
    """The scheduler's message if the node lacks a resource; None if there is room.

    Node selectors and affinity are not looked at.
    """
    has = node["status"]["allocatable"]
    taken: dict[str, float] = {"pods": 0.0}
    for other in pods:
        if "nodeName" in other["spec"] and not _facts.ended(other):
            taken["pods"] += 1
            for name, amount in _requests(other).items():
                taken[name] = taken.get(name, 0.0) + amount
    for name, amount in {**_requests(pod), "pods": 1.0}.items():
        free = quantity(has.get(name, "0")) - taken.get(name, 0.0)
        if amount > free + 1e-9:
            lack = "Too many pods" if name == "pods" else f"Insufficient {name}"
            return (
                f"0/1 nodes are available: 1 {lack}. preemption: 0/1 nodes are available: "
                "1 No preemption victims found for incoming pod."
            )
    return None


def _requests(pod: Json) -> dict[str, float]:
    total: dict[str, float] = {}
    for container in pod["spec"]["containers"]:
        for name, value in (container.get("resources", {}).get("requests") or {}).items():
            total[name] = total.get(name, 0.0) + quantity(value)
    return total

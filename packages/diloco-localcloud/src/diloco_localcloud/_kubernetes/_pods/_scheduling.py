"""The choice of a node for a pod, and the reasons why it fits on none: pure functions.

The messages and the order of the checks are those of the scheduler of Kubernetes 1.34, from its
source and from messages that users have published. The recordings that the stand-in is compared
with are all of a single node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .._objects._quantities import quantity
from . import _facts

Json = dict[str, Any]

UNSCHEDULABLE = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}  # cordoned


@dataclass(frozen=True)
class Lack:
    """The reason why a node cannot take a pod; ``for_good`` if it could not even when empty."""

    reason: str
    for_good: bool = True


Taken = Mapping[str, float]  # the requests of the pods on a node, by resource
Filter = Callable[[Json, Taken, Json], list[Lack]]  # (node, amounts taken of it, pod)


def choose(
    nodes: Sequence[Json],
    pods: Iterable[Json],
    pod: Json,
    filters: Sequence[Filter],
    lacking: str = "",
) -> tuple[str | None, str]:
    """Return the node for a pod: the one with the fewest pods of those that pass all filters.

    Args:
        nodes: all nodes.
        pods: all pods, ended ones too.
        pod: the pod that has no node.
        filters: called in this order; the first one that finds a lack decides for its node.
        lacking: why it fits on no node at all; empty if there is no such reason.

    Returns:
        (name, ""), or (None, the message of the scheduler).
    """
    if lacking:
        return None, _message(len(nodes), lacking, len(nodes))
    taken = _taken(pods)
    lacks: list[Lack] = []
    fitting: list[str] = []
    hopeless = 0
    for node in nodes:
        name = node["metadata"]["name"]
        node_lacks = next(
            (lack for rule in filters if (lack := rule(node, taken.get(name, {}), pod))), []
        )
        lacks += node_lacks
        hopeless += any(lack.for_good for lack in node_lacks)
        if not node_lacks:
            fitting.append(name)
    if fitting:
        return min(fitting, key=lambda name: taken.get(name, {}).get("pods", 0.0)), ""
    reasons = _listed(Counter(lack.reason for lack in lacks))
    return None, _message(len(nodes), reasons, hopeless)


def tainted(node: Json, _: Taken, pod: Json) -> list[Lack]:
    """Reject a cordoned node and one with a taint that the pod does not tolerate.

    The first such taint is named.
    """
    spec = node.get("spec") or {}
    if spec.get("unschedulable") and not tolerates(pod, UNSCHEDULABLE):
        return [Lack("node(s) were unschedulable")]
    for taint in spec.get("taints") or []:
        if taint["effect"] != "PreferNoSchedule" and not tolerates(pod, taint):
            value = taint.get("value") or ""
            return [Lack(f"node(s) had untolerated taint {{{taint['key']}: {value}}}")]
    return []


def unselected(node: Json, _: Taken, pod: Json) -> list[Lack]:
    """Reject a node that does not match the node selector and the required node affinity."""
    labels = node["metadata"].get("labels") or {}
    selector = pod["spec"].get("nodeSelector") or {}
    affinity = (pod["spec"].get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
    terms = required.get("nodeSelectorTerms") or [] if required else None
    if any(labels.get(key) != value for key, value in selector.items()) or (
        terms is not None and not any(_meets(term, labels) for term in terms)
    ):
        return [Lack("node(s) didn't match Pod's node affinity/selector")]
    return []


def full(node: Json, taken: Taken, pod: Json) -> list[Lack]:
    """Reject a node without room for the pod's requests."""
    has = (node.get("status") or {}).get("allocatable") or {}
    lacks = []
    for name, amount in {"pods": 1.0, **_requests(pod)}.items():
        whole = quantity(has.get(name, "0"))
        if amount > whole - taken.get(name, 0.0) + 1e-9:
            reason = "Too many pods" if name == "pods" else f"Insufficient {name}"
            lacks.append(Lack(reason, for_good=amount > whole))
    return lacks


ALL: tuple[Filter, ...] = (tainted, unselected, full)


def tolerates(pod: Json, taint: Mapping[str, Any]) -> bool:
    """Return whether a pod tolerates a taint, if only for a while."""
    return any(_matches(toleration, taint) for toleration in pod["spec"].get("tolerations") or [])


def toleration_seconds(pod: Json, taint: Json) -> float | None:
    """Return how many seconds a pod may stay on a node with a NoExecute taint.

    None means for ever, 0 not at all.
    """
    matching = [item for item in pod["spec"].get("tolerations") or [] if _matches(item, taint)]
    limits = [item.get("tolerationSeconds") for item in matching]
    seconds = [float(limit) for limit in limits if limit is not None]
    return min(seconds, default=None) if matching else 0.0


def _matches(toleration: Json, taint: Mapping[str, Any]) -> bool:
    if toleration.get("effect") not in (None, "", taint["effect"]):
        return False
    key, value = toleration.get("key"), toleration.get("value") or ""
    if toleration.get("operator") == "Exists":
        return key in (None, "", taint["key"])
    return key == taint["key"] and value == (taint.get("value") or "")


def _meets(term: Json, labels: Mapping[str, str]) -> bool:
    expressions = term.get("matchExpressions") or []
    return bool(expressions) and all(_holds(expression, labels) for expression in expressions)


def _holds(expression: Json, labels: Mapping[str, str]) -> bool:
    value = labels.get(expression.get("key", ""))
    values: list[str] = expression.get("values") or []
    operator: str = expression.get("operator", "")
    if operator == "In":
        return value in values
    if operator == "NotIn":
        return value not in values
    if operator in ("Exists", "DoesNotExist"):
        return (value is not None) == (operator == "Exists")
    try:
        number, bound = int(value or ""), int(values[0])
    except (ValueError, IndexError):
        return False
    return number > bound if operator == "Gt" else number < bound


def _taken(pods: Iterable[Json]) -> dict[str, dict[str, float]]:
    taken: dict[str, dict[str, float]] = {}
    for pod in pods:
        if "nodeName" in pod["spec"] and not _facts.ended(pod):
            of_node = taken.setdefault(pod["spec"]["nodeName"], {})
            for name, amount in {"pods": 1.0, **_requests(pod)}.items():
                of_node[name] = of_node.get(name, 0.0) + amount
    return taken


def _requests(pod: Json) -> dict[str, float]:
    total: dict[str, float] = {}
    for container in pod["spec"]["containers"]:
        for name, value in (container.get("resources", {}).get("requests") or {}).items():
            total[name] = total.get(name, 0.0) + quantity(value)
    return total


def _message(nodes: int, reasons: str, hopeless: int) -> str:
    if not nodes:
        return "no nodes available to schedule pods"
    helpless = {
        "Preemption is not helpful for scheduling": hopeless,
        "No preemption victims found for incoming pod": nodes - hopeless,
    }
    available = f"0/{nodes} nodes are available"
    return (
        f"{available}: {reasons}. no new claims to deallocate, preemption: "
        f"{available}: {_listed(helpless)}."
    )


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(sorted(f"{count} {words}" for words, count in counts.items() if count))

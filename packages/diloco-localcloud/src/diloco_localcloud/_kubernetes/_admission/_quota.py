"""ResourceQuota: the resources that the pods of a namespace may take together."""

from __future__ import annotations

from typing import Any

from .._objects import _resources
from .._objects._quantities import quantity
from .._objects._refusals import AdmissionError
from .._objects._store import Store
from .._pods import _facts

Json = dict[str, Any]

_PLAIN = ("cpu", "memory", "ephemeral-storage")  # ``cpu`` in a quota means ``requests.cpu``
_MUST_BE_GIVEN = frozenset(
    [*_PLAIN[:2], *(f"{kind}.{name}" for kind in ("requests", "limits") for name in _PLAIN[:2])]
)


def check(store: Store, pod: Json) -> None:
    """Refuse a pod for which a quota has no room.

    Raises:
        AdmissionError: names the quota, and the requested, used and allowed amounts.
    """
    namespace = pod["metadata"]["namespace"]
    for quota in store.list(_resources.QUOTAS, namespace):
        if not _counts(quota, pod["spec"]):
            continue
        hard = (quota.get("spec") or {}).get("hard") or {}
        name, amounts, used = quota["metadata"]["name"], _amounts(pod), _used(store, quota)
        missing = sorted(kind for kind in hard if kind in _MUST_BE_GIVEN and kind not in amounts)
        if missing:
            main = pod["spec"]["containers"][0]["name"]
            listed = "; ".join(f"{kind} for: {main}" for kind in missing)
            raise AdmissionError(f"failed quota: {name}: must specify {listed}")
        over = [
            kind
            for kind in sorted(hard)
            if kind in amounts and used.get(kind, 0.0) + amounts[kind] > quantity(hard[kind]) + 1e-9
        ]
        if over:
            wanted = ",".join(f"{kind}={_text(kind, amounts[kind])}" for kind in over)
            taken = ",".join(f"{kind}={_text(kind, used.get(kind, 0.0))}" for kind in over)
            allowed = ",".join(f"{kind}={hard[kind]}" for kind in over)
            raise AdmissionError(
                f"exceeded quota: {name}, requested: {wanted}, used: {taken}, limited: {allowed}"
            )


def refresh(store: Store, namespace: str) -> None:
    """Write the used amounts into the quotas of a namespace."""
    for quota in store.list(_resources.QUOTAS, namespace):
        hard = (quota.get("spec") or {}).get("hard") or {}
        total = _used(store, quota)
        used = {kind: _text(kind, total.get(kind, 0.0)) for kind in hard}
        status = {"hard": hard, "used": used}
        if quota.get("status") != status:
            store.replace(_resources.QUOTAS, {**quota, "status": status})


def _counts(quota: Json, pod: Json) -> bool:
    """Return whether a pod, given by its spec, is in all scopes of a quota."""
    spec = quota.get("spec") or {}
    scopes = [{"scopeName": name, "operator": "Exists"} for name in spec.get("scopes") or []]
    scopes += (spec.get("scopeSelector") or {}).get("matchExpressions") or []
    return all(_is_in(scope, pod) for scope in scopes)


def _is_in(scope: Json, pod: Json) -> bool:
    """Return whether a pod is in a scope; no pod is in CrossNamespacePodAffinity here.

    https://kubernetes.io/docs/concepts/policy/resource-quotas/#quota-scopes
    """
    ends, of_class = "activeDeadlineSeconds" in pod, str(pod.get("priorityClassName", ""))
    containers = [*pod.get("initContainers", []), *pod["containers"]]
    amounts = [part for one in containers for part in (one.get("resources") or {}).values()]
    asks = any(name in part for part in amounts for name in ("cpu", "memory"))
    listed = of_class in list(scope.get("values") or [])
    by_operator: dict[str, bool] = {
        "Exists": of_class != "",
        "DoesNotExist": of_class == "",
        "In": listed,
        "NotIn": not listed,
    }
    return {
        "Terminating": ends,
        "NotTerminating": not ends,
        "BestEffort": not asks,
        "NotBestEffort": asks,
        "PriorityClass": by_operator.get(scope.get("operator", ""), False),
    }.get(scope.get("scopeName", ""), False)


def _used(store: Store, quota: Json) -> dict[str, float]:
    total: dict[str, float] = {}
    for pod in store.list(_resources.PODS, quota["metadata"]["namespace"]):
        if not _facts.ended(pod) and _counts(quota, pod["spec"]):
            for name, amount in _amounts(pod).items():
                total[name] = total.get(name, 0.0) + amount
    return total


def _amounts(pod: Json) -> dict[str, float]:
    """Return the amounts that one pod takes, by the names that quotas have for them."""
    total = {"pods": 1.0, "count/pods": 1.0}
    for container in pod["spec"]["containers"]:
        resources = container.get("resources") or {}
        requests = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
        for kind, amounts in (("requests", requests), ("limits", resources.get("limits") or {})):
            for name, value in amounts.items():
                names = [f"{kind}.{name}"] + (
                    [name] if kind == "requests" and name in _PLAIN else []
                )
                for key in names:
                    total[key] = total.get(key, 0.0) + quantity(value)
    return total


def _text(name: str, value: float) -> str:
    """Return a quantity as the server writes it: thousandths of a CPU, binary units of bytes."""
    if name.endswith("cpu") and value != int(value):
        return f"{round(value * 1000)}m"
    if name.endswith(("memory", "storage")):
        for unit, size in (("Gi", 1024.0**3), ("Mi", 1024.0**2), ("Ki", 1024.0)):
            if value and value % size == 0:
                return f"{int(value / size)}{unit}"
    return str(int(value))

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
    for quota in filter(_counts, store.list(_resources.QUOTAS, namespace)):
        hard = (quota.get("spec") or {}).get("hard") or {}
        name, amounts, used = quota["metadata"]["name"], _amounts(pod), _used(store, namespace)
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
        total = _used(store, namespace) if _counts(quota) else {}
        used = {kind: _text(kind, total.get(kind, 0.0)) for kind in hard}
        status = {"hard": hard, "used": used}
        if quota.get("status") != status:
            store.replace(_resources.QUOTAS, {**quota, "status": status})


def _counts(quota: Json) -> bool:
    """Return whether a quota has an effect: those with scopes have none here."""
    spec = quota.get("spec") or {}
    return not spec.get("scopes") and not spec.get("scopeSelector")


def _used(store: Store, namespace: str) -> dict[str, float]:
    total: dict[str, float] = {}
    for pod in store.list(_resources.PODS, namespace):
        if not _facts.ended(pod):
            for name, amount in _amounts(pod).items():
                total[name] = total.get(name, 0.0) + amount
    return total


def _amounts(pod: Json) -> dict[str, float]:
    """Return the amounts that one pod takes, by the names that quotas have for them."""
    total = {"pods": 1.0, "count/pods": 1.0}
    for container in pod["spec"]["containers"]:
        resources = container.get("resources") or {}
        limits = resources.get("limits") or {}
        requests = {**limits, **(resources.get("requests") or {})}
        plain = {name: value for name, value in requests.items() if name in _PLAIN}
        for prefix, amounts in (("requests.", requests), ("limits.", limits), ("", plain)):
            for name, value in amounts.items():
                total[prefix + name] = total.get(prefix + name, 0.0) + quantity(value)
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

"""The admission of one pod: adds the defaults that it lacks, and refuses what is not allowed."""

from __future__ import annotations

import itertools
from typing import Any

from .._objects import _refusals, _resources
from .._objects._quantities import quantity
from .._objects._refusals import AdmissionError
from .._objects._store import Store
from . import _pod_security, _quota

Json = dict[str, Any]

# https://kubernetes.io/docs/tasks/administer-cluster/guaranteed-scheduling-critical-addon-pods/
_BUILT_IN = {"system-cluster-critical": 2_000_000_000, "system-node-critical": 2_000_001_000}


def admit(store: Store, pod: Json) -> Json:
    """Return the pod as it is kept.

    It was seen on a real server which of these rules apply to pods and not to their Jobs, and how
    quotas and PodSecurity are worded. The other messages are those of the server's source.

    Raises:
        ApiError: 403, with the reason as the server words it for a pod.
    """
    namespace = pod["metadata"]["namespace"]
    try:
        _limits(store, pod)
        _service_account(store, pod)
        pod = _priority(store, pod)
        _runtime_class(store, pod)
        pod = _tolerations(pod)
        level = _pod_security.level(_labels(store, namespace), "enforce")
        if level is not None:
            _pod_security.check(level, pod["spec"])
        _quota.check(store, pod)
    except AdmissionError as refused:
        meta = pod["metadata"]
        name = meta.get("generateName") or meta.get("name", "")
        message = f'pods "{name}" is forbidden: {refused}'
        raise _refusals.ApiError(
            403, "Forbidden", message, {"name": name, "kind": "pods"}
        ) from None
    return pod


def warnings(store: Store, namespace: str, spec: Json) -> list[str]:
    """Return the warnings about a Job's template, for which the server does not refuse it."""
    labels = _labels(store, namespace)
    mode = "warn" if "pod-security.kubernetes.io/warn" in labels else "enforce"  # as observed
    level = _pod_security.level(labels, mode)
    problems = _pod_security.problems(level, spec) if level is not None else ""
    return [f"would {problems}"] if problems else []


def _labels(store: Store, namespace: str) -> Json:
    entry = store.find(_resources.NAMESPACES, "", namespace) or {"metadata": {}}
    return entry["metadata"].get("labels") or {}


def _limits(store: Store, pod: Json) -> None:
    """Refuse a pod of which a container may use more than a LimitRange allows, or without limit."""
    ranges = store.list(_resources.LIMIT_RANGES, pod["metadata"]["namespace"])
    items = [item for limit_range in ranges for item in limit_range["spec"].get("limits") or []]
    problems = []
    for item, container in itertools.product(items, pod["spec"]["containers"]):
        limits = (container.get("resources") or {}).get("limits") or {}
        for name, most in sorted((item.get("max") or {}).items()):
            words = f"maximum {name} usage per Container is {most}"
            if name not in limits:
                problems.append(f"{words}.  No limit is specified")
            elif quantity(limits[name]) > quantity(most):
                problems.append(f"{words}, but limit is {limits[name]}")
    if problems:
        raise AdmissionError(problems[0] if len(problems) == 1 else f"[{', '.join(problems)}]")


def _service_account(store: Store, pod: Json) -> None:
    namespace, name = pod["metadata"]["namespace"], pod["spec"]["serviceAccountName"]
    if store.find(_resources.SERVICE_ACCOUNTS, namespace, name) is None:
        raise AdmissionError(
            f"error looking up service account {namespace}/{name}: "
            f'serviceaccount "{name}" not found'
        )


def _priority(store: Store, pod: Json) -> Json:
    name = pod["spec"].get("priorityClassName")
    if not name:
        return pod
    priority_class = store.find(_resources.PRIORITY_CLASSES, "", name)
    if priority_class is None and name not in _BUILT_IN:
        raise AdmissionError(f"no PriorityClass with name {name} was found")
    value = _BUILT_IN[name] if priority_class is None else priority_class.get("value", 0)
    return {**pod, "spec": {**pod["spec"], "priority": value}}


def _tolerations(pod: Json) -> Json:
    """Add the default tolerations: pods leave nodes that do not answer after five minutes."""
    tolerations = pod["spec"].get("tolerations") or []
    added = [
        {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300}
        for key in ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
        if not any(
            item.get("key") in (key, None, "") and item.get("effect") in ("NoExecute", None, "")
            for item in tolerations
        )
    ]
    return {**pod, "spec": {**pod["spec"], "tolerations": [*tolerations, *added]}} if added else pod


def _runtime_class(store: Store, pod: Json) -> None:
    name = pod["spec"].get("runtimeClassName")
    if name and store.find(_resources.RUNTIME_CLASSES, "", name) is None:
        raise AdmissionError(f'pod rejected: RuntimeClass "{name}" not found')

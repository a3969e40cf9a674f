"""Facts that a pod's object shows."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]

TRACKING = "batch.kubernetes.io/job-tracking"
INDEX = "batch.kubernetes.io/job-completion-index"
FAILURES = "batch.kubernetes.io/job-index-failure-count"
IGNORED = "batch.kubernetes.io/job-index-ignored-failure-count"


def index_of(pod: Json) -> int | None:
    """Return the completion index, or None."""
    return _annotated(pod, INDEX)


def count_of(pod: Json, annotation: str) -> int:
    """Return a failure count from the annotations; 0 if there is none."""
    return _annotated(pod, annotation) or 0


def _annotated(pod: Json, name: str) -> int | None:
    """Return a number that the Job controller has written; users may write other text there."""
    text = (pod["metadata"].get("annotations") or {}).get(name, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else None


def phase(pod: Json) -> str:
    """Return ``status.phase``."""
    return str(pod.get("status", {}).get("phase", "Pending"))


def ended(pod: Json) -> bool:
    """Return whether its phase is a final one."""
    return phase(pod) in ("Succeeded", "Failed")


def deleting(pod: Json) -> bool:
    """Return whether it is being deleted."""
    return "deletionTimestamp" in pod["metadata"]


def tracked(pod: Json) -> bool:
    """Return whether the Job controller has yet to count it."""
    return TRACKING in pod["metadata"].get("finalizers", [])


def is_ready(pod: Json) -> bool:
    """Return whether its condition Ready is true."""
    return condition(pod, "Ready").get("status") == "True"


def runs(pod: Json) -> bool:
    """Return whether its containers run, as far as its status shows."""
    states = [entry["state"] for entry in pod.get("status", {}).get("containerStatuses", [])]
    return bool(states) and all("running" in state for state in states)


def condition(pod: Json, kind: str) -> Json:
    """Return a condition of the pod; {} if it has none of this type."""
    for entry in pod.get("status", {}).get("conditions", []):
        if entry["type"] == kind:
            return dict(entry)
    return {}


def container_status(pod: Json, name: str) -> Json:
    """Return a container's status; {} if there is none yet."""
    for entry in pod.get("status", {}).get("containerStatuses", []):
        if entry["name"] == name:
            return dict(entry)
    return {}


def terminations(pod: Json) -> list[Json]:
    """Return the ``terminated`` states of its containers, init containers too."""
    status = pod.get("status", {})
    both = [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]
    return [
        {"name": entry["name"], **entry["state"]["terminated"]}
        for entry in both
        if "terminated" in entry["state"]
    ]

"""A pod, as the Job controller makes it."""

from __future__ import annotations

import copy
from typing import Any

from .._pods._facts import INDEX, TRACKING

Json = dict[str, Any]


def owner(job: Json) -> Json:
    """Return the reference of an object to the Job that owns it."""
    meta = job["metadata"]
    names = {"apiVersion": "batch/v1", "kind": "Job", "name": meta["name"], "uid": meta["uid"]}
    return {**names, "controller": True}


def from_job(job: Json, index: int | None, suffix: str, annotations: dict[str, str]) -> Json:
    """Return the pod for an index, as the controller sends it."""
    template = copy.deepcopy(job["spec"]["template"])
    meta = template.get("metadata", {})
    spec = template["spec"]
    stem = job["metadata"]["name"] if index is None else f"{job['metadata']['name']}-{index}"
    labels = dict(meta.get("labels") or {})
    notes = {**(meta.get("annotations") or {}), **annotations}
    if index is not None:
        labels[INDEX] = notes[INDEX] = str(index)
        spec["hostname"] = stem
        for container in [*spec.get("initContainers", []), *spec["containers"]]:
            _inject_index(container)
    account = spec.get("serviceAccountName", "default")
    accounts = {"serviceAccountName": account, "serviceAccount": account}
    defaults = {"enableServiceLinks": True, "preemptionPolicy": "PreemptLowerPriority"}
    spec = {**accounts, **defaults, "priority": 0, **spec}
    prefix = f"{stem}-"
    if len(prefix) > 58:  # leaves room for the five letters: the Job's name is cut, the index stays
        tail = prefix[len(job["metadata"]["name"]) :]
        prefix = job["metadata"]["name"][: 58 - len(tail)] + tail
    return {
        "kind": "Pod",
        "apiVersion": "v1",
        "metadata": {
            "name": prefix + suffix,
            "generateName": prefix,
            "namespace": job["metadata"]["namespace"],
            "labels": labels,
            **({"annotations": notes} if notes else {}),
            "ownerReferences": [{**owner(job), "blockOwnerDeletion": True}],
            "finalizers": [*(meta.get("finalizers") or []), TRACKING],
        },
        "spec": spec,
        "status": {"phase": "Pending", "qosClass": "BestEffort"},
    }


def _inject_index(container: Json) -> None:
    env = container.setdefault("env", [])
    if all(entry["name"] != "JOB_COMPLETION_INDEX" for entry in env):
        path = f"metadata.labels['{INDEX}']"
        source = {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}
        env.append({"name": "JOB_COMPLETION_INDEX", "valueFrom": source})

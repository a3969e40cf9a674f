"""Pods as the Job controller makes them, and what is read off a pod."""

from __future__ import annotations

import copy
from typing import Any

Json = dict[str, Any]

TRACKING = "batch.kubernetes.io/job-tracking"
INDEX = "batch.kubernetes.io/job-completion-index"
FAILURES = "batch.kubernetes.io/job-index-failure-count"
IGNORED = "batch.kubernetes.io/job-index-ignored-failure-count"


def with_defaults(spec: Json) -> Json:
    """A pod spec with what the API server adds to it."""
    new: Json = {
        "dnsPolicy": "ClusterFirst",
        "restartPolicy": "Always",
        "schedulerName": "default-scheduler",
        "securityContext": {},
        "terminationGracePeriodSeconds": 30,
        **copy.deepcopy(spec),
    }
    if new.get("serviceAccountName"):
        new.setdefault("serviceAccount", new["serviceAccountName"])
    for kind in ("initContainers", "containers"):
        if kind in new:
            new[kind] = [_container(container) for container in new[kind]]
    return new


def _container(container: Json) -> Json:
    image = container.get("image", "")
    last = image.rpartition("/")[2]
    latest = "@" not in last and (":" not in last or last.endswith(":latest"))
    new = {
        "resources": {},
        "terminationMessagePath": "/dev/termination-log",
        "terminationMessagePolicy": "File",
        "imagePullPolicy": "Always" if latest else "IfNotPresent",
        **container,
    }
    for entry in new.get("env") or []:
        if "fieldRef" in (entry.get("valueFrom") or {}):
            entry["valueFrom"]["fieldRef"].setdefault("apiVersion", "v1")
    limits = new["resources"].get("limits")
    if limits:
        new["resources"] = {**new["resources"], "requests": {**limits, **new["resources"].get("requests", {})}}
    return new


def from_job(job: Json, index: int | None, suffix: str, annotations: dict[str, str]) -> Json:
    """The pod of an index, as the controller sends it."""
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
    spec.setdefault("serviceAccountName", "default")
    spec.setdefault("serviceAccount", spec["serviceAccountName"])
    spec.setdefault("enableServiceLinks", True)
    spec.setdefault("preemptionPolicy", "PreemptLowerPriority")
    spec.setdefault("priority", 0)
    owner = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "name": job["metadata"]["name"],
        "uid": job["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }
    prefix = f"{stem}-"
    if len(prefix) > 58:  # room for the five letters: the job's name is cut, the index stays
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
            "ownerReferences": [owner],
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


def index_of(pod: Json) -> int | None:
    """The completion index, or None."""
    text = (pod["metadata"].get("annotations") or {}).get(INDEX, "")
    return int(text) if text.isdigit() else None


def count_of(pod: Json, annotation: str) -> int:
    """A failure count from the annotations; 0 if there is none."""
    text = (pod["metadata"].get("annotations") or {}).get(annotation, "")
    return int(text) if text.isdigit() else 0


def phase(pod: Json) -> str:
    """``status.phase``."""
    return str(pod.get("status", {}).get("phase", "Pending"))


def ended(pod: Json) -> bool:
    """Whether its phase is a last one."""
    return phase(pod) in ("Succeeded", "Failed")


def deleting(pod: Json) -> bool:
    """Whether it has been told to go."""
    return "deletionTimestamp" in pod["metadata"]


def tracked(pod: Json) -> bool:
    """Whether the Job controller has yet to count it."""
    return TRACKING in pod["metadata"].get("finalizers", [])


def is_ready(pod: Json) -> bool:
    """Whether its condition Ready is true."""
    return condition(pod, "Ready").get("status") == "True"


def condition(pod: Json, kind: str) -> Json:
    """A condition of the pod; {} if it has none of this type."""
    for entry in pod.get("status", {}).get("conditions", []):
        if entry["type"] == kind:
            return dict(entry)
    return {}


def container_status(pod: Json, name: str) -> Json:
    """A container's status; {} if there is none yet."""
    for entry in pod.get("status", {}).get("containerStatuses", []):
        if entry["name"] == name:
            return dict(entry)
    return {}


def terminations(pod: Json) -> list[Json]:
    """The ``terminated`` states of its containers, init containers too."""
    status = pod.get("status", {})
    both = [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]
    return [{"name": entry["name"], **entry["state"]["terminated"]} for entry in both if "terminated" in entry["state"]]

"""The states of a pod, as changes of its status: pure functions from pod to pod."""

from __future__ import annotations

import copy
import hashlib
from typing import Any

from . import _facts

Json = dict[str, Any]


def with_status(pod: Json, **fields: Any) -> Json:
    """Return the pod with these fields of its status set."""
    return {**pod, "status": {**copy.deepcopy(pod["status"]), **fields}}


def with_condition(
    pod: Json, kind: str, *, true: bool, now: str, reason: str = "", message: str = ""
) -> Json:
    """Return the pod with a condition set; its transition time is kept if the status stays."""
    status = "True" if true else "False"
    entries = {entry["type"]: entry for entry in pod["status"].get("conditions", [])}
    old = entries.get(kind, {})
    since = old["lastTransitionTime"] if old.get("status") == status else now
    new = {"type": kind, "status": status, "lastProbeTime": None, "lastTransitionTime": since}
    words = {"reason": reason, "message": message}
    entries[kind] = {**new, **{key: text for key, text in words.items() if text}}
    return with_status(pod, conditions=list(entries.values()))


def unschedulable(pod: Json, message: str, now: str) -> Json:
    """Return the pod as one that fits on no node for now."""
    words = {"reason": "Unschedulable", "message": message}
    pod = with_status(pod, phase="Pending")
    return with_condition(pod, "PodScheduled", true=False, now=now, **words)


def bound(pod: Json, node: str, now: str) -> Json:
    """Return the pod with a node whose kubelet has not looked at it yet."""
    pod = {**pod, "spec": {**pod["spec"], "nodeName": node}}
    return with_condition(pod, "PodScheduled", true=True, now=now)


def waiting(pod: Json, reason: str, message: str, now: str) -> Json:
    """Return the pod while the kubelet prepares its containers: pulls images, or fails to."""
    state: Json = {"waiting": {"reason": reason, **({"message": message} if message else {})}}
    host, started = "127.0.0.1", pod["status"].get("startTime", now)
    place = {"hostIP": host, "hostIPs": [{"ip": host}], "startTime": started}
    pod = with_status(pod, phase="Pending", **place)
    pod = with_condition(pod, "PodReadyToStartContainers", true=True, now=now)
    pod = with_condition(pod, "Initialized", true=True, now=now)
    pod = _unready(pod, now, "ContainersNotReady")
    return with_status(pod, containerStatuses=_statuses(pod, state))


def running(pod: Json, now: str, address: str = "") -> Json:
    """Return the pod with all its containers running and ready."""
    statuses = _statuses(pod, {"running": {"startedAt": now}})
    address = address or _address(pod)
    place = {"podIP": address, "podIPs": [{"ip": address}]}
    pod = with_status(pod, phase="Running", containerStatuses=statuses, **place)
    pod = with_condition(pod, "Ready", true=True, now=now)
    return with_condition(pod, "ContainersReady", true=True, now=now)


def terminated(
    pod: Json,
    container: str,
    code: int,
    now: str,
    *,
    reason: str = "",
    message: str = "",
    signal: int | None = None,
) -> Json:
    """Return the pod with one container ended; the phase follows later, by ``ended``."""
    old = _facts.container_status(pod, container)
    state: Json = {
        "exitCode": code,
        "reason": reason or ("Completed" if code == 0 else "Error"),
        "startedAt": old.get("state", {}).get("running", {}).get("startedAt", now),
        "finishedAt": now,
        "containerID": old.get("containerID", _container_id(pod, container)),
        **({"message": message} if message else {}),
        **({"signal": signal} if signal else {}),
    }
    return _with_end(pod, container, state, now)


def never_made(pod: Json, container: str, now: str) -> Json:
    """Return a deleted pod with an end for a container that was never made.

    It was seen with no times and no ID.
    """
    state = {
        "exitCode": 137,
        "reason": "ContainerStatusUnknown",
        # This message is from the kubelet's source; the rest was seen.
        "message": "The container could not be located when the pod was terminated",
        "startedAt": None,
        "finishedAt": None,
    }
    return _with_end(pod, container, state, now)


def _with_end(pod: Json, container: str, state: Json, now: str) -> Json:
    known = pod["status"].get("containerStatuses")
    known = known or _statuses(pod, {"waiting": {"reason": "ContainerCreating"}})
    ends = {entry["name"]: entry for entry in _statuses(pod, {"terminated": state})}
    statuses = [ends[container] if entry["name"] == container else entry for entry in known]
    return with_status(_unready(pod, now, "ContainersNotReady"), containerStatuses=statuses)


def ended(pod: Json, now: str) -> Json:
    """Return the pod after all containers have ended: Succeeded if all with 0, else Failed."""
    states = [entry["state"] for entry in pod["status"]["containerStatuses"]]
    good = not any(state.get("terminated", {}).get("exitCode", 1) for state in states)
    pod = _unready(pod, now, "PodCompleted" if good else "PodFailed")
    return with_status(pod, phase="Succeeded" if good else "Failed")


def disrupted(pod: Json, reason: str, message: str, now: str) -> Json:
    """Return the pod marked as ended by the cluster (condition DisruptionTarget)."""
    words = {"reason": reason, "message": message}
    return with_condition(pod, "DisruptionTarget", true=True, now=now, **words)


def answering(pod: Json, now: str, *, yes: bool) -> Json:
    """Return the pod of a node that does not answer, or answers again.

    As observed, it is not ready then, while its containers still count as running. What happens
    when the node answers again follows the source; it was not seen.
    """
    return with_condition(pod, "Ready", true=yes, now=now)


def _unready(pod: Json, now: str, reason: str) -> Json:
    names = " ".join(container["name"] for container in pod["spec"]["containers"])
    message = f"containers with unready status: [{names}]" if reason == "ContainersNotReady" else ""
    for kind in ("Ready", "ContainersReady"):
        pod = with_condition(pod, kind, true=False, now=now, reason=reason, message=message)
    return pod


def _statuses(pod: Json, state: Json) -> list[Json]:
    """Return the statuses of all containers in this state."""
    begun, runs = "waiting" not in state, "running" in state
    return [
        {
            "name": container["name"],
            "image": container.get("image", ""),
            "imageID": f"stand-in://{container.get('image', '')}" if begun else "",
            **({"containerID": _container_id(pod, container["name"])} if begun else {}),
            "lastState": {},
            "ready": runs,
            "restartCount": 0,
            "started": runs,
            "state": state,
        }
        for container in pod["spec"]["containers"]
    ]


def _container_id(pod: Json, name: str) -> str:
    text = f"{pod['metadata']['uid']}/{name}/0"
    return "containerd://" + hashlib.sha256(text.encode()).hexdigest()


def _address(pod: Json) -> str:
    digest = hashlib.sha256(pod["metadata"]["uid"].encode()).digest()
    return f"10.244.{digest[0]}.{digest[1] or 1}"

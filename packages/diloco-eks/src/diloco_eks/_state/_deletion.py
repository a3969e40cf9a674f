"""Descriptions of pods that are being deleted: on whose request, and what they wait for."""

from __future__ import annotations

from datetime import UTC, datetime

from ._facts import PodFacts
from ._verdict import read_message, taken_away

_KILLED = 128 + 9  # the exit code after SIGKILL
_NO_REASON = "by hand, with its namespace, or by something that gave no reason"


def why_deleting(pod: PodFacts) -> str:
    """Return why a pod is being deleted, where its own Job did not delete it."""
    when = "" if pod.told_to_end is None else f" since {clock(pod.told_to_end)}"
    if pod.disruption is None:
        return f"its pod {pod.name} is being deleted{when}: {_NO_REASON}"
    text = f"its pod {pod.name} is being taken away{when} ({taken_away(pod)})"
    if not pod.unreachable:
        return text
    since = "" if pod.unready_since is None else f" since {clock(pod.unready_since)}"
    return (
        f"{text}; its node {pod.node} has not answered{since}. It is not replaced before the node "
        "is back or is removed from the cluster: if the machine is gone for good, run: kubectl "
        f"delete node {pod.node}"
    )


def why_gone(pod: PodFacts | None) -> str:
    """Return why the last pod of a replica is gone; empty if that is not known."""
    if pod is not None and pod.disruption is not None:
        return f"its pod {pod.name} was taken away ({taken_away(pod)})"
    if pod is not None and pod.deleting:
        return f"its pod {pod.name} {how_deleted(pod)}"
    return ""


def how_deleted(pod: PodFacts) -> str:
    """Return what is known about the deletion of a pod that its own Job did not end."""
    if pod.told_to_end is not None:
        return f"was deleted at {clock(pod.told_to_end)}: {_NO_REASON}"
    if (pod.terminated or {}).get("exitCode") == _KILLED and read_message(pod) is None:
        return (
            "was deleted, or its program was ended by SIGKILL before that; which of both is not "
            "known"
        )
    return f"was deleted: {_NO_REASON}"


def clock(seconds: float) -> str:
    """Return a time in UTC, as Kubernetes writes it."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

"""The cause of an end: the replica itself, its run, or a deletion, and on whose request it was."""

from __future__ import annotations

from datetime import UTC, datetime

from diloco_protocol import Reason

from ._facts import PodFacts
from ._verdict import read_message, taken_away

_KILLED = 128 + 9  # the exit code after SIGKILL
_NO_REASON = "by hand, with its namespace, or by something that gave no reason"
_SIGNALS_OF_DELETES = {128 + 15, _KILLED}  # exit codes after SIGTERM and after SIGKILL


def ended_by_itself(pod: PodFacts, decided: float | None) -> bool:
    """Return whether a pod's container had ended before it was told to.

    Args:
        pod: The pod.
        decided: When the end of its Job was decided, if it was. Ranks that end later fail because
            others are gone.
    """
    finished = pod.finished_at
    if pod.terminated is None or pod.never_ran or pod.disrupted:
        return False
    if not pod.deleting:
        return decided is None or finished is None or finished <= decided
    if pod.told_to_end is None and left_as_told(pod):
        return False
    times = [time for time in (pod.told_to_end, decided) if time is not None]
    return finished is not None and bool(times) and finished < min(times)


def deleted_by_others(pod: PodFacts, decided: float | None, *, counted: bool = False) -> bool:
    """Return whether a user deleted a pod while it ran: not its node, nor its Job as that ended.

    Args:
        pod: The pod.
        decided: When the end of its Job was decided, if it was.
        counted: Whether its Job lists it as failed, and so did not end it.
    """
    if not pod.deleting or pod.disrupted:
        return False
    if pod.told_to_end is not None:
        first = decided is None or pod.told_to_end < decided
        return first and not ended_by_itself(pod, decided)
    # The time when it was told to end is not known any more; it was before the pod ended.
    finished = pod.finished_at
    first = counted or decided is None or (finished is not None and finished < decided)
    return first and left_as_told(pod)


def left_as_told(pod: PodFacts) -> bool:
    """Return whether a pod's container ended in the way of one that was told to end.

    The runner reports that. Without its report, the exit code of the signal shows it.
    """
    end = pod.terminated or {}
    report = read_message(pod)
    if report is not None:
        return report.outcome.reason is Reason.CANCEL_REQUESTED
    return end.get("exitCode") in _SIGNALS_OF_DELETES and end.get("reason") != "OOMKilled"


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

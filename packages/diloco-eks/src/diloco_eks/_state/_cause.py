"""The cause of an end: the replica itself, its run, or a user who deleted its pod."""

from __future__ import annotations

from diloco_protocol import Reason

from ._facts import PodFacts
from ._verdict import read_message

_SIGNALS_OF_DELETES = {128 + 15, 128 + 9}  # exit codes after SIGTERM and after SIGKILL


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

"""Whose end it was: a replica's own, that of its run, or that of somebody who deleted its pod."""

from __future__ import annotations

from diloco_protocol import Reason

from ._facts import PodFacts
from ._verdict import read_message

_SIGNALS_OF_DELETES = {128 + 15, 128 + 9}  # exit codes after SIGTERM, and after SIGKILL


def ended_by_itself(pod: PodFacts, decided: float | None) -> bool:
    """Return whether its container had ended before anybody told it to.

    Args:
        pod: The pod.
        decided: When the end of its Job was decided, if it was. Later ranks fail because
            others have gone.
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
    """Return whether somebody deleted it while it ran: not its node, nor its Job as that ended.

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
    # When it was told is not known any more. It was before it ended.
    finished = pod.finished_at
    first = counted or decided is None or (finished is not None and finished < decided)
    return first and left_as_told(pod)


def left_as_told(pod: PodFacts) -> bool:
    """Return whether its container ended as one does that is told to end.

    The runner says so. Without its report there is the exit code of the signal.
    """
    end = pod.terminated or {}
    report = read_message(pod)
    if report is not None:
        return report.outcome.reason is Reason.CANCEL_REQUESTED
    return end.get("exitCode") in _SIGNALS_OF_DELETES and end.get("reason") != "OOMKilled"

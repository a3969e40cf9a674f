"""The wait of a Job before it replaces a failed pod."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..._server import _timeline
from .._pods import _facts

Json = dict[str, Any]

FIRST_SECONDS = 10.0
LONGEST_SECONDS = 600.0


@dataclass(frozen=True)
class Backoff:
    """The controller's record per Job: failures since the last success, and the last one's time."""

    failures: int = 0
    last: float = 0.0

    def after(self, succeeded: list[Json], failed: list[Json], now: float) -> Backoff:
        """Return the record that also counts these newly ended pods."""
        good = max((finished(pod, now) for pod in succeeded), default=None)
        bad = sorted(finished(pod, now) for pod in failed)
        if good is not None:
            later = [moment for moment in bad if moment > good]
            return Backoff(len(later), later[-1]) if later else Backoff()
        return Backoff(self.failures + len(bad), bad[-1]) if bad else self

    def remaining(self, now: float, first: float) -> float:
        """Return the seconds to wait before the next pod may be made."""
        return wait(self.failures, self.last, now, first)


def wait(failures: int, last: float, now: float, first: float) -> float:
    """Return the seconds left to wait: ``first``, doubled per further failure, at most 600."""
    if failures <= 0:
        return 0.0
    length: float = min(first * 2 ** min(failures - 1, 10), LONGEST_SECONDS)
    return max(0.0, last + length - now)


def finished(pod: Json, now: float) -> float:
    """Return when the last container ended.

    For a pod that never ran it is when the pod was deleted, or stopped being ready to run.
    """
    ends: list[str] = [
        end["finishedAt"] for end in _facts.terminations(pod) if end.get("finishedAt")
    ]
    if ends:
        return max(map(_timeline.seconds, ends))
    deletion = pod["metadata"].get("deletionTimestamp")
    if deletion is not None:
        return _timeline.seconds(deletion) - float(
            pod["metadata"].get("deletionGracePeriodSeconds", 0)
        )
    since = _facts.condition(pod, "Ready").get("lastTransitionTime") or pod["metadata"].get(
        "creationTimestamp"
    )
    return _timeline.seconds(since) if since else now

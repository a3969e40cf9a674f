"""The status of a Job: its conditions, its counts, and its lists of indexes: ``0,2-4``."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from ..._server import _timeline

Json = dict[str, Any]

_MOST_INDEX = 10_000_000  # far more than any Job has


def true_condition(status: Json, kind: str) -> Json | None:
    """Return the condition of this type if it is true; None otherwise."""
    for entry in status.get("conditions", []):
        if entry["type"] == kind and entry["status"] == "True":
            return dict(entry)
    return None


def finished(job: Json) -> bool:
    """Return whether the Job is Complete or Failed."""
    status = job.get("status", {})
    return bool(true_condition(status, "Complete") or true_condition(status, "Failed"))


def finish_time(job: Json) -> float:
    """Return when the Job became Complete or Failed, in seconds since the epoch.

    Raises:
        ValueError: it is not finished.
    """
    status = job.get("status", {})
    entry = true_condition(status, "Complete") or true_condition(status, "Failed")
    if entry is None:
        raise ValueError("the Job is not finished")
    return _timeline.seconds(entry["lastTransitionTime"])


def set_condition(
    status: Json, kind: str, value: str, reason: str, message: str, now: float
) -> None:
    """Set a condition in place; one that already has this value stays as it is."""
    entries = status.setdefault("conditions", [])
    new = {
        "type": kind,
        "status": value,
        "lastProbeTime": _timeline.stamp(now),
        "lastTransitionTime": _timeline.stamp(now),
        "reason": reason,
        "message": message,
    }
    for place, entry in enumerate(entries):
        if entry["type"] == kind:
            if entry["status"] != value:
                entries[place] = new
            return
    entries.append(new)


def start_status(job: Json, now: float) -> Json:
    """Return a copy of the status with the additions of the controller's first look."""
    status: Json = copy.deepcopy(job.get("status", {}))
    status.setdefault("uncountedTerminatedPods", {})
    if "startTime" not in status and not job["spec"].get("suspend"):
        status["startTime"] = _timeline.stamp(now)
    return status


def write_counts(status: Json, *, active: int, ready: int, terminating: int) -> None:
    """Set the counts in place; an ``active`` of 0 is left out, the other two never are."""
    status.pop("active", None)
    if active:
        status["active"] = active
    status["ready"] = ready
    status["terminating"] = terminating


def settle(status: Json, released: set[str], ending: Json | None, now: float) -> Json:
    """Return the status after the finalizers of the ``released`` pods are taken off.

    They are counted, and the Job is finished if there is nothing left to wait for.
    """
    status = copy.deepcopy(status)
    uncounted = status.get("uncountedTerminatedPods", {}).get("failed", [])
    counted = [uid for uid in uncounted if uid in released]
    if counted:
        status["failed"] = status.get("failed", 0) + len(counted)
        left = [uid for uid in uncounted if uid not in released]
        status["uncountedTerminatedPods"] = {"failed": left} if left else {}
    if (
        ending is not None
        and not status.get("uncountedTerminatedPods")
        and not status.get("terminating")
    ):
        set_condition(status, ending["type"], "True", ending["reason"], ending["message"], now)
        if ending["type"] == "Complete":
            status["completionTime"] = _timeline.stamp(now)
    return status


def index_text(indexes: Iterable[int]) -> str:
    """Return the sorted list, with three or more neighbours as a range: two stay ``1,2``."""
    ordered = sorted(set(indexes))
    if not ordered:
        return ""
    cuts = [
        0,
        *(place for place, (low, high) in enumerate(pairwise(ordered), 1) if high != low + 1),
        len(ordered),
    ]
    parts = []
    for start, end in pairwise(cuts):
        run = ordered[start:end]
        parts.append(f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run)))
    return ",".join(parts)


def parse_indexes(listed: str) -> set[int]:
    """Return the indexes of a list that ``index_text`` wrote.

    Raises:
        ValueError: it is not such a list.
    """
    indexes: set[int] = set()
    for part in filter(None, listed.split(",")):
        first, dash, last = part.partition("-")
        if not (first.isdecimal() and (last.isdecimal() or not dash)) or len(first + last) > 20:
            raise ValueError(f"{part!r} is neither an index nor a range of indexes")
        if int(last or first) > _MOST_INDEX:
            raise ValueError(f"{last or first} is above {_MOST_INDEX}")
        indexes.update(range(int(first), int(last or first) + 1))
    return indexes

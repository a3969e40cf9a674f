"""The decision when a Job ends, and its reason and message."""

from __future__ import annotations

from typing import Any

from ..._server import _timeline
from . import _failure_policy

Json = dict[str, Any]


def complete() -> Json:
    """Return the end of a Job of which every index has succeeded."""
    return _success("CompletionsReached", "Reached expected number of succeeded pods")


def failure(
    job: Json, new_failed: list[Json], count: int, started: str | None, now: float
) -> Json | None:
    """Return the end by pod failure policy, back-off limit or deadline; None if the Job goes on.

    Args:
        job: the Job as stored.
        new_failed: failed pods that are not counted yet.
        count: the number of failures that count, including the new ones.
        started: ``status.startTime``.
        now: seconds since the epoch.
    """
    spec = job["spec"]
    for pod in new_failed:
        message = _failure_policy.match(job, pod).message
        if message:
            return _failed("PodFailurePolicy", message)
    if count > spec["backoffLimit"]:
        return _failed("BackoffLimitExceeded", "Job has reached the specified backoff limit")
    deadline = spec.get("activeDeadlineSeconds")
    timed = deadline is not None and started is not None and not spec.get("suspend")
    if timed and now - _timeline.seconds(started or "") >= deadline:
        return _failed("DeadlineExceeded", "Job was active longer than specified deadline")
    return None


def failure_by_index(spec: Json, done: set[int], failed: set[int]) -> Json | None:
    """Return the end by failed indexes, with ``backoffLimitPerIndex``; None if the Job goes on."""
    most = spec.get("maxFailedIndexes")
    if most is not None and len(failed) > most:
        message = "Job has exceeded the specified maximal number of failed indexes"
        return _failed("MaxFailedIndexesExceeded", message)
    if failed and len(failed) + len(done) >= spec["completions"]:
        return _failed("FailedIndexes", "Job has failed indexes")
    return None


def _failed(reason: str, message: str) -> Json:
    return {"type": "FailureTarget", "reason": reason, "message": message}


def _success(reason: str, message: str) -> Json:
    return {"type": "SuccessCriteriaMet", "reason": reason, "message": message}

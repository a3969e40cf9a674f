"""When a Job ends, and why: its limits, and what ``podFailurePolicy`` makes of the end of a pod."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..._server import _timeline
from .._pods import _facts

Json = dict[str, Any]


@dataclass(frozen=True)
class Match:
    """The result of the first matching rule."""

    action: str | None = None
    message: str | None = None

    @property
    def counts(self) -> bool:
        """Return whether the failure counts towards the limits."""
        return self.action != "Ignore"


def match(job: Json, pod: Json) -> Match:
    """Return the rule that decides on this failed pod; the empty match if there is none."""
    for place, rule in enumerate((job["spec"].get("podFailurePolicy") or {}).get("rules", [])):
        cause = None
        if rule.get("onExitCodes"):
            cause = _by_exit_code(rule["onExitCodes"], pod)
        elif rule.get("onPodConditions"):
            cause = _by_condition(rule["onPodConditions"], pod)
        if cause is not None:
            action = rule["action"]
            return Match(
                action,
                f"{cause} matching {action} rule at index {place}" if action == "FailJob" else None,
            )
    return Match()


def _where(pod: Json) -> str:
    return f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"


def _by_exit_code(wanted: Json, pod: Json) -> str | None:
    for end in _facts.terminations(pod):
        if wanted.get("containerName") not in (None, "", end["name"]) or end["exitCode"] == 0:
            continue
        if (end["exitCode"] in wanted["values"]) == (wanted["operator"] == "In"):
            return (
                f"Container {end['name']} for pod {_where(pod)} failed "
                f"with exit code {end['exitCode']}"
            )
    return None


def _by_condition(wanted: list[Json], pod: Json) -> str | None:
    for pattern in wanted:
        if _facts.condition(pod, pattern["type"]).get("status") == pattern.get("status", "True"):
            return f"Pod {_where(pod)} has condition {pattern['type']}"
    return None


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
        message = match(job, pod).message
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

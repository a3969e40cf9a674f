"""``podFailurePolicy``: the meaning of a pod's end for its Job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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

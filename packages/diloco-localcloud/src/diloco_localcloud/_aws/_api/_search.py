"""The test of a job against the filters of a search."""

from __future__ import annotations

from typing import Any

from .._model._refused import invalid

Json = dict[str, Any]

TIMES = ("CreationTime", "LastModifiedTime", "TrainingStartTime", "TrainingEndTime")


def matches(job: Json, request: Json) -> bool:
    """Return whether a job, with its tags, passes all filters of the request's SearchExpression.

    Raises:
        RefusedError: the expression uses a feature that is not served.
    """
    expression = request.get("SearchExpression") or {}
    unserved = sorted(key for key in expression if key != "Filters")
    if unserved:
        raise invalid(f"the stand-in serves Filters alone in a search, not {', '.join(unserved)}")
    passed = [_passes(job, wanted) for wanted in expression.get("Filters") or ()]
    return all(passed)  # every filter is looked at, so that an unserved one is refused


def _passes(job: Json, wanted: Json) -> bool:
    name, operator = str(wanted["Name"]), str(wanted.get("Operator", "Equals"))
    if operator not in ("Contains", "Equals"):
        raise invalid(f"the stand-in serves the operators Contains and Equals, not {operator}")
    if "Value" not in wanted:
        raise invalid(f"the filter of {name} needs a Value")
    text, value = str(wanted["Value"]), _value(job, name)
    if operator == "Equals" or value is None:
        return value is not None and str(value) == text
    return text.lower() in str(value).lower()


def _value(job: Json, name: str) -> Any:
    word, dot, key = name.partition(".")
    if word == "Tags" and dot:
        return next((tag["Value"] for tag in job["Tags"] if tag["Key"] == key), None)
    value: Any = job
    for part in name.split("."):
        if not isinstance(value, dict):
            return None
        value = value.get(part)
    return value

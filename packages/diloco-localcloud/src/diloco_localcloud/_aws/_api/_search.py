"""The test of a job against the filters of a search."""

from __future__ import annotations

from typing import Any

from .._model._refused import invalid

Json = dict[str, Any]

TIMES = ("CreationTime", "LastModifiedTime", "TrainingStartTime", "TrainingEndTime")


def matches(job: Json, request: Json) -> bool:
    """Return whether a job, with its tags, meets the request's SearchExpression.

    Raises:
        RefusedError: the expression uses a feature that is not supported.
    """
    return _meets(job, request.get("SearchExpression") or {})


def _meets(job: Json, expression: Json) -> bool:
    if expression.get("NestedFilters"):
        raise invalid("the stand-in does not know NestedFilters")
    results = [_filter(job, part) for part in expression.get("Filters") or ()]
    results += [_meets(job, part) for part in expression.get("SubExpressions") or ()]
    if not results:
        return True
    return any(results) if expression.get("Operator") == "Or" else all(results)


def _filter(job: Json, wanted: Json) -> bool:
    name, operator = str(wanted["Name"]), str(wanted.get("Operator", "Equals"))
    text: str | None = wanted.get("Value")
    value = _value(job, name)
    if operator in {"Exists", "NotExists"}:
        return (value is not None) is (operator == "Exists")
    if text is None:
        raise invalid(f"the filter of {name} needs a Value")
    if operator == "NotEquals":
        return value is None or str(value) != text
    if value is None:
        return False
    if operator == "Equals":
        return str(value) == text
    if operator == "Contains":
        return text.lower() in str(value).lower()
    if operator == "In":
        return str(value) in text.split(",")
    try:
        left, right = float(value), float(text)
    except (TypeError, ValueError):
        raise invalid(f"the stand-in compares numbers alone by {operator}, not {text!r}") from None
    if operator == "GreaterThan":
        return left > right
    if operator == "GreaterThanOrEqualTo":
        return left >= right
    return left < right if operator == "LessThan" else left <= right


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

"""Label and field selectors."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from .._objects import _refusals

Json = dict[str, Any]

# Besides the name and the namespace.
_FIELDS = {
    "Pod": "spec.nodeName spec.restartPolicy status.phase",
    "Job": "status.successful",
    "Event": "involvedObject.kind involvedObject.name involvedObject.namespace involvedObject.uid "
    "reason type",
}


def by_labels(selector: str) -> Callable[[Json], bool]:
    """Return a test of objects for ``a=b,c``.

    Raises:
        ApiError: 400, the selector cannot be parsed.
    """
    tests = [_label_test(part, selector) for part in _parts(selector)]
    return lambda obj: all(test(obj["metadata"].get("labels") or {}) for test in tests)


def by_fields(selector: str, kind: str) -> Callable[[Json], bool]:
    """Return a test of objects for ``status.phase=Running``.

    Raises:
        ApiError: 400, this kind cannot be selected by one of the fields.
    """
    allowed = ("metadata.name", "metadata.namespace", *_FIELDS.get(kind, "").split())
    tests: list[tuple[str, str]] = []
    for part in _parts(selector):
        match = re.fullmatch(r"([^=!]+)==?(.*)", part)
        if match is None:
            raise _refusals.bad_request(
                f"invalid selector: '{selector}'; can't understand '{part}'"
            )
        name, value = match.groups()
        if name not in allowed:
            raise _refusals.bad_request(f"field label not supported: {name}")
        tests.append((name, value))
    return lambda obj: all(_field(obj, name) == value for name, value in tests)


def _field(obj: Json, path: str) -> str:
    value: Any = obj
    for step in path.split("."):
        value = value.get(step, "") if isinstance(value, dict) else ""
    return str(value)


def _parts(selector: str) -> list[str]:
    return [part.strip() for part in selector.split(",") if part.strip()]


def _label_test(part: str, whole: str) -> Callable[[dict[str, str]], bool]:
    match = re.fullmatch(r"([^=!\s()]+)(?:\s*==?\s*([^=!\s()]*))?", part)
    if match is None:
        raise _refusals.bad_request(
            f"unable to parse requirement: found '{part}', in selector '{whole}': the stand-in "
            "serves a label, and its value after ="
        )
    key, value = match.groups()
    if value is None:
        return lambda labels: key in labels
    return lambda labels: labels.get(key) == value

"""Label and field selectors."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from .._objects import _refusals

if TYPE_CHECKING:
    from collections.abc import Callable

Json = dict[str, Any]

_SET = re.compile(r"(?P<key>\S+)\s+(?P<how>in|notin)\s+\((?P<values>[^()]*)\)")
_FIELDS = {
    "Pod": (
        "metadata.name",
        "metadata.namespace",
        "spec.nodeName",
        "spec.restartPolicy",
        "status.phase",
    ),
    "Job": ("metadata.name", "metadata.namespace", "status.successful"),
    "Event": (
        "metadata.name",
        "metadata.namespace",
        "involvedObject.kind",
        "involvedObject.name",
        "involvedObject.namespace",
        "involvedObject.uid",
        "reason",
        "type",
    ),
}


def by_labels(selector: str) -> Callable[[Json], bool]:
    """Return a test of objects for ``a=b,c!=d,e in (f,g),h,!i``.

    Raises:
        ApiError: 400, the selector cannot be parsed.
    """
    tests = [_label_test(part.strip(), selector) for part in _parts(selector)]
    return lambda obj: all(test(obj["metadata"].get("labels") or {}) for test in tests)


def by_fields(selector: str, kind: str) -> Callable[[Json], bool]:
    """Return a test of objects for ``status.phase=Running,metadata.name!=x``.

    Raises:
        ApiError: 400, this kind cannot be selected by one of the fields.
    """
    allowed = _FIELDS.get(kind, ("metadata.name", "metadata.namespace"))
    tests: list[tuple[str, bool, str]] = []
    for part in filter(None, selector.split(",")):
        match = re.fullmatch(r"([^=!]+)(!=|==|=)(.*)", part)
        if match is None:
            raise _refusals.bad_request(
                f"invalid selector: '{selector}'; can't understand '{part}'"
            )
        name, how, value = match.groups()
        if name not in allowed:
            raise _refusals.bad_request(f"field label not supported: {name}")
        tests.append((name, how != "!=", value))
    return lambda obj: all((_field(obj, name) == value) == wanted for name, wanted, value in tests)


def _field(obj: Json, path: str) -> str:
    value: Any = obj
    for step in path.split("."):
        value = value.get(step, "") if isinstance(value, dict) else ""
    return str(value)


def _parts(selector: str) -> list[str]:
    parts = re.split(r",(?![^(]*\))", selector)
    return [part for part in parts if part.strip()]


def _label_test(part: str, whole: str) -> Callable[[dict[str, str]], bool]:
    match = _SET.fullmatch(part)
    if match:
        key, values = match["key"], {value.strip() for value in match["values"].split(",")}
        if match["how"] == "in":
            return lambda labels: labels.get(key) in values
        return lambda labels: labels.get(key) not in values
    match = re.fullmatch(r"([^=!\s]+)\s*(!=|==|=)\s*([^=!\s]*)", part)
    if match:
        key, how, value = match.groups()
        if how == "!=":
            return lambda labels: labels.get(key) != value
        return lambda labels: labels.get(key) == value
    if re.fullmatch(r"![^=!\s]+", part):
        return lambda labels: part[1:].strip() not in labels
    if re.fullmatch(r"[^=!\s()]+", part):
        return lambda labels: part in labels
    raise _refusals.bad_request(
        f"unable to parse requirement: found '{part}', in selector '{whole}'"
    )

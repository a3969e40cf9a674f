"""What the query of a request asks for: numbers, pages, and selectors of labels and fields."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from .._objects import _refusals

Json = dict[str, Any]

_DIGITS = re.compile(r"[+-]?[0-9]+")
# Besides the name and the namespace.
_FIELDS = {
    "Pod": "spec.nodeName spec.restartPolicy status.phase",
    "Job": "status.successful",
    "Event": "involvedObject.kind involvedObject.name involvedObject.namespace involvedObject.uid "
    "reason type",
}


def whole(query: Mapping[str, str], name: str) -> int | None:
    """Return a parameter as an int64; None if it is not given.

    Raises:
        ApiError: 400, in the words of Go's ``strconv``.
    """
    text = query.get(name)
    if not text:
        return None
    if not _DIGITS.fullmatch(text):
        raise _refusals.bad_request(f'strconv.ParseInt: parsing "{text}": invalid syntax')
    digits = text.lstrip("+-0")
    if len(digits) > 19 or not -(2**63) <= int(text) < 2**63:
        raise _refusals.bad_request(f'strconv.ParseInt: parsing "{text}": value out of range')
    return int(text)


def page(items: list[Json], limit: int, token: str, version: int) -> tuple[list[Json], Json]:
    """Return one page of a sorted list.

    The token names the last object shown, so that no object that stays is lost if the list changes
    between two pages.

    Returns:
        The items of the page, and the list's metadata.

    Raises:
        ApiError: 400: the token was not made here.
    """
    if token:
        try:
            last = json.loads(base64.urlsafe_b64decode(token))
            after, version = (last["namespace"], last["name"]), last["version"]
            if [type(part) for part in (*after, version)] != [str, str, int]:
                raise TypeError
        except (ValueError, KeyError, TypeError, RecursionError):
            raise _refusals.bad_request(f"continue key is not valid: {token}") from None
        items = [item for item in items if _key(item) > after]
    meta: Json = {"resourceVersion": str(version)}
    if 0 < limit < len(items):
        rest = len(items) - limit
        items = items[:limit]
        namespace, name = _key(items[-1])
        mark = json.dumps({"namespace": namespace, "name": name, "version": version})
        meta |= {
            "continue": base64.urlsafe_b64encode(mark.encode()).decode(),
            "remainingItemCount": rest,
        }
    return items, meta


def _key(item: Json) -> tuple[str, str]:
    return item["metadata"].get("namespace", ""), item["metadata"]["name"]


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

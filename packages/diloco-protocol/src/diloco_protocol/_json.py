"""JSON that comes back exactly as it went in, or is refused."""

from __future__ import annotations

import json
import math
from typing import Any

from ._errors import InvalidRequestError


def check_json(value: Any, path: str) -> None:
    """Refuse what JSON cannot carry exactly.

    Args:
        value: Anything.
        path: What to call it in the error, such as ``"kwargs"``.

    Raises:
        InvalidRequestError: It names the path to the value, what it is, and what is allowed.
    """
    _check(value, path, ())


def dumps(value: Any) -> str:
    """Compact JSON with sorted keys: equal values give equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _check(value: Any, path: str, above: tuple[int, ...]) -> None:
    kind = type(value)
    if value is None or kind in {bool, int}:
        return
    if kind is str:
        if not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError:
                raise InvalidRequestError(f"{path} holds a lone surrogate, which no channel can carry") from None
        return
    if kind is float:
        if math.isfinite(value):
            return
        raise InvalidRequestError(f"{path} is {value}, and JSON has no number for that: pass None or text instead")
    if kind in {list, dict} and id(value) in above:
        raise InvalidRequestError(f"{path} contains itself")
    if kind is list:
        for index, item in enumerate(value):
            _check(item, f"{path}[{index}]", (*above, id(value)))
        return
    if kind is dict:
        for key, item in value.items():
            if type(key) is not str:
                raise InvalidRequestError(
                    f"{path} has the key {key!r} of type {type(key).__name__}; JSON keys are strings"
                )
            _check(key, f"a key of {path}", above)
            _check(item, f"{path}.{key}", (*above, id(value)))
        return
    hint = ": pass a list" if isinstance(value, (tuple, set, frozenset)) else ""
    raise InvalidRequestError(
        f"{path} is a {kind.__module__}.{kind.__qualname__}, which is no JSON value "
        f"(None, bool, int, float, str, list, dict){hint}"
    )

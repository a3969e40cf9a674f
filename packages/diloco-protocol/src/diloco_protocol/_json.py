"""JSON that comes back exactly as it went in, or is refused."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

from ._checks import shown
from ._errors import InvalidRequestError

# Python's own parser refuses integers of more than 4300 digits, which are 14,284 bits.
_MAX_INTEGER_BITS = 14_000
# Far below the recursion limit, wherever the reader stands.
_MAX_DEPTH = 200


def check_json(value: Any, path: str) -> None:
    """Refuse what JSON cannot carry exactly.

    Args:
        value: Anything.
        path: What to call it in the error, such as ``"kwargs"``.

    Raises:
        InvalidRequestError: It names the path to the value, what it is, and what is allowed.
    """
    if not _plain(value):
        _check(value, path, ())


def dumps(value: Any) -> str:
    """Compact JSON, with the order of keys kept; of a value that :func:`check_json` has passed."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def canonical(value: Any) -> str:
    """Compact JSON with sorted keys: equal values give equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def loads(text: str, what: str) -> Any:
    """Parse JSON, strictly.

    Raises:
        InvalidRequestError: It is not JSON; the error calls it ``what``.
    """
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{what} is not JSON: {error}") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _plain(value: Any) -> bool:
    """Whether a value needs no closer look; the path to it is only put together if it does."""
    kind = type(value)
    return (
        value is None
        or kind is bool
        or (kind is float and math.isfinite(value))
        or (kind is int and value.bit_length() <= _MAX_INTEGER_BITS)
        or (kind is str and value.isascii())
    )


def _check(value: Any, path: str, above: tuple[int, ...]) -> None:
    kind = type(value)
    if kind is str:
        try:
            value.encode()
        except UnicodeEncodeError:
            raise InvalidRequestError(
                f"{path} contains half of a surrogate pair, which cannot be sent as text"
            ) from None
    elif kind is float:
        raise InvalidRequestError(
            f"{path} is {value}, and JSON has no number for that: pass None or text instead"
        )
    elif kind is int:
        raise InvalidRequestError(
            f"{path} is an integer of {value.bit_length()} bits, and Python reads at most {_MAX_INTEGER_BITS} from JSON: "
            "pass it as text"
        )
    elif kind is list:
        inside = _enter(value, path, above)
        for index, item in enumerate(value):
            if not _plain(item):
                _check(item, f"{path}[{index}]", inside)
    elif kind is dict:
        inside = _enter(value, path, above)
        for key, item in value.items():
            if type(key) is not str:
                raise InvalidRequestError(
                    f"{path} has the key {shown(key)} of type {type(key).__name__}; JSON keys are strings"
                )
            if not key.isascii():
                _check(key, f"a key of {path}", inside)
            if not _plain(item):
                _check(item, f"{path}.{key}", inside)
    else:
        hint = ": pass a list" if isinstance(value, (tuple, set, frozenset)) else ""
        raise InvalidRequestError(
            f"{path} is a {kind.__module__}.{kind.__qualname__}, which is not a JSON value "
            f"(None, bool, int, float, str, list, dict){hint}"
        )


def _enter(value: list[Any] | dict[Any, Any], path: str, above: tuple[int, ...]) -> tuple[int, ...]:
    if id(value) in above:
        raise InvalidRequestError(f"{path} contains itself")
    if len(above) >= _MAX_DEPTH:
        raise InvalidRequestError(
            f"the JSON value around {path[:200]}… is nested more than {_MAX_DEPTH} levels deep"
        )
    return (*above, id(value))

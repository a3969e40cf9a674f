"""Checks of a caller's arguments.

Each check returns the value, or raises an error that names it and says what is allowed.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from itertools import takewhile
from typing import Any, Literal, TypeGuard, TypeVar, overload

from ._errors import InvalidRequestError
from ._redact import redact_and_cut, redact_json
from ._secret_forms import REDACTED
from ._secret_names import is_secret_name

T = TypeVar("T")

_SHOWN = 200
_LOOKED_AT = 1 << 15  # characters and items of a value of which so many characters are shown


@overload
def check_whole(
    name: str,
    value: object,
    least: int,
    most: int | None = ...,
    *,
    none: Literal[False] = ...,
) -> int: ...
@overload
def check_whole(
    name: str, value: object, least: int, most: int | None = ..., *, none: Literal[True]
) -> int | None: ...
def check_whole(
    name: str, value: object, least: int, most: int | None = None, *, none: bool = False
) -> int | None:
    """Check for a whole number from ``least`` to ``most``; ``True`` and ``2.0`` are refused.

    Args:
        name: Name of the value in the error.
        value: The value to check.
        least: The smallest number allowed.
        most: The largest number allowed; None for no limit.
        none: Whether None is allowed too.

    Raises:
        InvalidRequestError: The value is something else.
    """
    if none and value is None:
        return None
    if type(value) is not int or value < least or (most is not None and value > most):
        limits = f"from {least}" if most is None else f"from {least} to {most}"
        allowed = f"a whole number {limits}{' or None' if none else ''}"
        raise _refused(name, allowed, value)
    return value


def read_whole(name: str, text: str, least: int, most: int) -> int:
    """Read a whole number from text from an untrusted source, of any length.

    Args:
        name: Name of the value in the error.
        text: ASCII digits, and nothing else.
        least: The smallest number allowed, at least 0.
        most: The largest number allowed.

    Raises:
        InvalidRequestError: The text is something else.
    """
    digits = text.isascii() and text.isdecimal() and len(text) <= len(str(most))
    if not digits or not least <= int(text) <= most:
        excerpt = redact_and_cut(text, 40)
        raise _refused(name, f"a whole number from {least} to {most}", excerpt)
    return int(text)


def check_seconds(
    name: str, value: object, *, positive: bool = False, most: float = math.inf
) -> float:
    """Check for a finite number of seconds.

    Args:
        name: Name of the value in the error.
        value: The value to check.
        positive: Whether 0 is refused.
        most: The largest number allowed.

    Raises:
        InvalidRequestError: The value is something else.
    """
    if not is_number(value) or not 0 <= value <= most or (positive and value == 0):
        allowed = "a positive number of seconds" if positive else "a number of seconds from 0"
        limit = "" if most == math.inf else f"{' up' * positive} to {most:g}"
        raise _refused(name, f"{allowed}{limit}", value)
    return float(value)


def check_text(name: str, value: object) -> str:
    """Check for text that UTF-8 can encode and that does not consist of blanks alone.

    Raises:
        InvalidRequestError: The value is something else.
    """
    if not isinstance(value, str) or not value.strip():
        raise _refused(name, "non-empty text", value)
    if has_half_a_pair(value):
        raise InvalidRequestError(
            f"{name} contains half of a surrogate pair, which cannot be sent as text"
        )
    return value


def check_amount(name: str, value: object) -> str | None:
    """Check for a positive number, an amount in the backend's own words (text), or None.

    A number is returned as text.

    Raises:
        InvalidRequestError: The value is something else.
    """
    if value is None:
        return None
    if isinstance(value, str):
        return check_text(name, value)
    if not is_number(value) or value <= 0:
        raise _refused(name, "a positive number, text or None", value)
    return f"{value:g}"


def check_texts(name: str, values: object) -> dict[str, str]:
    """Check for a mapping of text to text that UTF-8 can encode, and return it sorted by its keys.

    None stands for an empty mapping.

    Raises:
        InvalidRequestError: The value is something else; the error names the first key that is
            wrong.
    """
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        # The content is not shown: it may be a secret.
        raise InvalidRequestError(
            f"{name} must be a mapping of text to text, not a value of type {type(values).__name__}"
        )
    for key, value in values.items():
        if not isinstance(key, str) or not isinstance(value, str):
            # The value is not shown: it may be a secret.
            raise InvalidRequestError(
                f"{name} must map text to text; {shown(key)} maps to a value of type "
                f"{type(value).__name__}"
            )
        if has_half_a_pair(key) or has_half_a_pair(value):
            raise InvalidRequestError(
                f"{name}[{shown(key)}] contains half of a surrogate pair, which cannot be sent as "
                "text"
            )
    return dict(sorted(values.items()))


def has_half_a_pair(text: str) -> bool:
    """Return whether a text contains half of a surrogate pair.

    Such a half stands for a byte that is not UTF-8, and cannot be sent as text.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def check_path(name: str, value: object) -> str | os.PathLike[str]:
    """Check for the name of a file or a folder, as text or a path object; bytes are refused.

    Raises:
        InvalidRequestError: The value is something else, or empty, or contains characters that no
            file system accepts.
    """
    text = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    try:
        known = isinstance(text, str) and text != "" and b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        known = False
    if not known:
        raise _refused(name, "a path", value)
    return value  # type: ignore[return-value] # known to be one


def check_home(name: str, value: object) -> str | os.PathLike[str]:
    """Check for a path as :func:`check_path` does, and expand ``~`` or ``~user`` at its beginning.

    Raises:
        InvalidRequestError: The value is not a path, or there is no such home folder.
    """
    given = check_path(name, value)
    if not os.fspath(given).startswith("~"):
        return given
    # expanduser leaves the path as it is if there is no such home folder, and raises nothing.
    path = os.path.expanduser(given)  # noqa: PTH111
    if path.startswith("~"):
        text = os.fspath(given)
        raise InvalidRequestError(
            f"{name}={shown(text)}: there is no such home folder. Write {shown(f'./{text}')} for a "
            "folder of that name"
        )
    return path


def check_names(name: str, values: object) -> tuple[str, ...]:
    """Check for a list of non-empty texts; any iterable is accepted.

    Raises:
        InvalidRequestError: The value is something else, or a single text, whose letters would be
            taken for the items of the list.
    """
    return _items(name, values, "text", check_text)


def check_paths(name: str, values: object) -> tuple[str | os.PathLike[str], ...]:
    """Check for a list of paths, each as :func:`check_home` does."""
    return _items(name, values, "paths", check_home)


def _items(
    name: str, values: object, what: str, check: Callable[[str, object], T]
) -> tuple[T, ...]:
    if isinstance(values, (str, os.PathLike)):
        raise InvalidRequestError(
            f"{name} must be a list of {what}, not a single one: write [{shown(values)}]"
        )
    if not isinstance(values, Iterable) or isinstance(values, (bytes, Mapping)):
        raise _refused(name, f"a list of {what}", values)
    return tuple(check(f"{name}[{number}]", item) for number, item in enumerate(values))


def check_callable(name: str, value: object) -> object:
    """Check for something that can be called.

    Raises:
        InvalidRequestError: The value is something else.
    """
    if not callable(value):
        raise _refused(name, "a function", value)
    return value


def or_none(check: Callable[[str, Any], T]) -> Callable[[str, Any], T | None]:
    """Return a check that also accepts None."""
    return lambda name, value: None if value is None else check(name, value)


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether a value is a number to calculate with.

    ``True``, NaN, infinity and integers beyond the range of floats are not.
    """
    # Comparing large integers with floats never overflows; converting them to float does.
    return (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and -sys.float_info.max <= value <= sys.float_info.max
    )


def shown(value: object, name: str = "") -> str:
    """Return a value as an error message can show it: without secrets, a line or two at most.

    Args:
        value: Anything.
        name: Name of the value in the message. For a name such as ``labels['DB_PASSWORD']``,
            nothing of the value is shown, because of the key.
    """
    if value is not None and is_secret_name(name.partition("[")[2]):
        return REDACTED
    if type(value) is int and value.bit_length() > 64:
        return "a number of that size"
    try:
        # Redact before repr() changes how line ends and quotes are written.
        begin = (
            redact_and_cut(value, _SHOWN)
            if isinstance(value, str)
            else redact_json(_beginning(value, [_LOOKED_AT]))
        )
        text = repr(begin)
    # Raised for integers of thousands of digits, endless nesting, and objects of some classes
    except Exception:  # noqa: BLE001
        return f"a {type(value).__name__} that cannot be shown"
    return redact_and_cut(text, _SHOWN)


def _beginning(value: object, left: list[int]) -> object:
    """Return the beginning of a value, which may be megabytes of anything."""
    left[0] -= 1
    if isinstance(value, (str, bytes)):
        begin = value[: max(left[0], 0)]
        left[0] -= len(begin)
        return begin
    if not isinstance(value, (dict, list, tuple)):
        return value
    items = takewhile(lambda _: left[0] > 0, value.items() if isinstance(value, dict) else value)
    if isinstance(value, dict):
        return {_beginning(key, left): _beginning(inside, left) for key, inside in items}
    return type(value)(_beginning(inside, left) for inside in items)


def _refused(name: str, allowed: str, value: object) -> InvalidRequestError:
    return InvalidRequestError(f"{name} must be {allowed}, not {shown(value, name)}")

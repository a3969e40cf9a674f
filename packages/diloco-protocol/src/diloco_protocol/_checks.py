"""Checks of what a caller gives: each returns the value, or names it and says what is allowed."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Mapping
from typing import Literal, TypeGuard, overload

from ._errors import InvalidRequestError
from ._redact import redact_and_cut, redact_json
from ._secret_forms import REDACTED
from ._secret_names import is_secret_name

_SHOWN = 200


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
    """A whole number from ``least`` to ``most``; ``True`` and ``2.0`` are refused.

    Args:
        name: What to call the value in the error.
        value: What was given.
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
        raise _refused(name, f"a whole number {limits}", value, none=none)
    return value


def read_whole(name: str, text: str, least: int, most: int) -> int:
    """Read a whole number from text that somebody else may have written, however long that is.

    Args:
        name: What to call the value in the error.
        text: ASCII digits, with nothing around them.
        least: The smallest number allowed, at least 0.
        most: The largest number allowed.

    Raises:
        InvalidRequestError: The text is something else.
    """
    digits = text.isascii() and text.isdecimal() and len(text) <= len(str(most))
    if not digits or not least <= int(text) <= most:
        given = redact_and_cut(text, 40)
        raise _refused(name, f"a whole number from {least} to {most}", given, none=False)
    return int(text)


@overload
def check_seconds(
    name: str,
    value: object,
    *,
    positive: bool = ...,
    most: float = ...,
    none: Literal[False] = ...,
) -> float: ...
@overload
def check_seconds(
    name: str,
    value: object,
    *,
    positive: bool = ...,
    most: float = ...,
    none: Literal[True],
) -> float | None: ...
def check_seconds(
    name: str,
    value: object,
    *,
    positive: bool = False,
    most: float = math.inf,
    none: bool = False,
) -> float | None:
    """A finite number of seconds.

    Args:
        name: What to call the value in the error.
        value: What was given.
        positive: Whether 0 is refused.
        most: The largest number allowed.
        none: Whether None is allowed too.

    Raises:
        InvalidRequestError: The value is something else.
    """
    if none and value is None:
        return None
    if not is_number(value) or not 0 <= value <= most or (positive and value == 0):
        allowed = "a positive number of seconds" if positive else "a number of seconds from 0"
        allowed += (
            "" if most == math.inf else f" to {most:g}" if not positive else f" up to {most:g}"
        )
        raise _refused(name, allowed, value, none=none)
    return float(value)


@overload
def check_text(name: str, value: object, *, none: Literal[False] = ...) -> str: ...
@overload
def check_text(name: str, value: object, *, none: Literal[True]) -> str | None: ...
def check_text(name: str, value: object, *, none: bool = False) -> str | None:
    """Text that UTF-8 can write, and that does not consist of blanks alone.

    Args:
        name: What to call the value in the error.
        value: What was given.
        none: Whether None is allowed too.

    Raises:
        InvalidRequestError: The value is something else.
    """
    if none and value is None:
        return None
    if not isinstance(value, str) or not value.strip():
        raise _refused(name, "non-empty text", value, none=none)
    if has_half_a_pair(value):
        raise InvalidRequestError(
            f"{name} contains half of a surrogate pair, which cannot be sent as text"
        )
    return value


def check_amount(name: str, value: object) -> str | None:
    """A positive number, or an amount in the backend's own words (text), or None; numbers become text.

    Raises:
        InvalidRequestError: The value is something else.
    """
    if value is None or isinstance(value, str):
        return check_text(name, value, none=True)
    if not is_number(value) or value <= 0:
        raise _refused(name, "a positive number, text", value, none=True)
    return f"{value:g}"


def check_texts(name: str, values: object) -> dict[str, str]:
    """A mapping of text to text, which UTF-8 can write, sorted by its keys; None stands for an empty one.

    Raises:
        InvalidRequestError: The value is something else; the error names the first key that is
            wrong.
    """
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        # Its content is not shown either.
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
    """Whether a text contains half of a surrogate pair: it stands for a byte that is no UTF-8, and cannot be sent."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def check_path(name: str, value: object) -> str | os.PathLike[str]:
    """The name of a file or a folder, as text or a path object; bytes are refused.

    Raises:
        InvalidRequestError: The value is something else, or empty, or contains what no file system
            takes.
    """
    if not isinstance(value, (str, os.PathLike)) or not isinstance(os.fspath(value), str):
        raise _refused(name, "a path", value, none=False)
    if not os.fspath(value):
        raise InvalidRequestError(f"{name} must be a path, but it is empty")
    try:
        known = b"\0" not in os.fsencode(value)
    except UnicodeEncodeError:
        known = False
    if not known:
        raise InvalidRequestError(
            f"{name} must be a path, and no file can have the name {shown(os.fspath(value))}"
        )
    return value


def check_home(name: str, value: object) -> str | os.PathLike[str]:
    """As :func:`check_path`, with the home folder in place of ``~`` or ``~user`` at the beginning.

    Raises:
        InvalidRequestError: The value is no path, or there is no such home.
    """
    given = check_path(name, value)
    if not os.fspath(given).startswith("~"):
        return given
    # Which tells whether there is such a home, and raises nothing
    path = os.path.expanduser(given)  # noqa: PTH111
    if path.startswith("~"):
        text = os.fspath(given)
        raise InvalidRequestError(
            f"{name}={shown(text)}: there is no such home folder. Write {shown(f'./{text}')} for a "
            "folder of that name"
        )
    return path


def check_names(name: str, values: object) -> tuple[str, ...]:
    """A list of non-empty texts, in any iterable.

    Raises:
        InvalidRequestError: The value is something else, or a single text, whose letters would be
            taken for the list.
    """
    return tuple(
        check_text(f"{name}[{number}]", each)
        for number, each in enumerate(_items(name, values, "text"))
    )


def check_paths(name: str, values: object) -> tuple[str | os.PathLike[str], ...]:
    """A list of paths, in any iterable.

    Raises:
        InvalidRequestError: The value is something else, or a single text, whose letters would be
            taken for the list.
    """
    return tuple(
        check_path(f"{name}[{number}]", each)
        for number, each in enumerate(_items(name, values, "paths"))
    )


def check_callable(name: str, value: object) -> object:
    """Something that can be called.

    Raises:
        InvalidRequestError: The value is something else.
    """
    if not callable(value):
        raise _refused(name, "a function", value, none=False)
    return value


def _items(name: str, values: object, what: str) -> Iterable[object]:
    if isinstance(values, (str, os.PathLike)):
        raise InvalidRequestError(
            f"{name} must be a list of {what}, not a single one: write [{shown(values)}]"
        )
    if not isinstance(values, Iterable) or isinstance(values, (bytes, Mapping)):
        raise _refused(name, f"a list of {what}", values, none=False)
    return values


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether a value is a number to calculate with: not ``True``, NaN or infinity, and no integer beyond all floats."""
    # No comparison overflows, as a conversion of the largest integers does.
    return (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and -sys.float_info.max <= value <= sys.float_info.max
    )


def shown(value: object, name: str = "") -> str:
    """Return a value as an error message can show it: without secrets, and no longer than a line or two.

    Args:
        value: Anything.
        name: What the message calls it. Of ``labels['DB_PASSWORD']`` nothing is shown, because of
            the key.
    """
    if value is not None and is_secret_name(name.partition("[")[2]):
        return REDACTED
    if type(value) is int and value.bit_length() > 64:
        return "a number of that size"
    try:
        # Before Python writes line ends and quotes in another way.
        begin = redact_and_cut(value, _SHOWN) if isinstance(value, str) else redact_json(value)
        text = repr(begin)
    # Integers of thousands of digits, endless nesting, objects of any class
    except Exception:  # noqa: BLE001
        return f"a {type(value).__name__} that cannot be shown"
    return redact_and_cut(text, _SHOWN)


def _refused(name: str, allowed: str, value: object, *, none: bool) -> InvalidRequestError:
    return InvalidRequestError(
        f"{name} must be {allowed}{' or None' if none else ''}, not {shown(value, name)}"
    )

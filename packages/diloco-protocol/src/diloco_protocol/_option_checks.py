"""Checks that are made for one option: of a text's form, a choice, a range, a command."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable

from ._checks import check_names, check_seconds, check_whole, shown
from ._errors import InvalidRequestError
from ._redact import redact_text

RUNNER = ("python", "-m", "diloco_protocol.runner")
"""The command that starts the runner, if the options do not say."""


def text_like(
    pattern: str, allowed: str, show: Callable[[object, str], str] = shown
) -> Callable[[str, object], str]:
    """Return a check for text of a form.

    Args:
        pattern: What the whole text must match.
        allowed: The form in words, for the error.
        show: Returns the value as the error may show it; called with the value and its name.
    """
    form = re.compile(pattern)

    def check(name: str, value: object) -> str:
        if not isinstance(value, str) or not form.fullmatch(value):
            raise InvalidRequestError(f"{name} must be {allowed}, not {show(value, name)}")
        return value

    return check


def one_of(*choices: str) -> Callable[[str, object], str]:
    """Return a check for one of some texts."""
    return text_like("|".join(map(re.escape, choices)), f"one of {', '.join(choices)}")


def whole(least: int, most: int) -> Callable[[str, object], int]:
    """Return a check for a whole number in a range."""
    return lambda name, value: check_whole(name, value, least, most)


def seconds(most: float = math.inf, *, positive: bool = False) -> Callable[[str, object], float]:
    """Return a check for a number of seconds."""
    return lambda name, value: check_seconds(name, value, most=most, positive=positive)


def check_flag(name: str, value: object) -> bool:
    """Check for True or False.

    Raises:
        InvalidRequestError: The value is something else.
    """
    if not isinstance(value, bool):
        raise InvalidRequestError(f"{name} must be True or False, not {shown(value)}")
    return value


def check_command(name: str, value: object) -> tuple[str, ...]:
    """Check for the words of the command that starts the runner; None stands for :data:`RUNNER`.

    Raises:
        InvalidRequestError: The value is something else, such as one text.
    """
    if value is None:
        return RUNNER
    if isinstance(value, str):
        text = redact_text(value)
        try:
            split = shlex.split(text)
        except ValueError:  # a closing quote is missing
            split = text.split()
        raise InvalidRequestError(f"{name} must be a list of words, not text: write {shown(split)}")
    words = check_names(name, value)
    if not words:
        raise InvalidRequestError(f"{name} must be a list of words, not an empty one")
    return words

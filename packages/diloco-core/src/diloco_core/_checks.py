"""Checks of arguments that several places share."""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Integral, Real
from typing import TypeGuard

import torch

from ._errors import ConfigurationError

MOST_RANKS = 10**5
"""Ranks have five digits in keys."""


def kind_of(value: object) -> str:
    """The name of a value's class, with its article: ``an Adam``, ``a dict``, ``an SGD``."""
    name = type(value).__name__
    if name[:2].isupper():  # read letter by letter
        return f"{'an' if name[0] in 'AEFHILMNORSX' else 'a'} {name}"
    return f"{'an' if name[0].lower() in 'aeio' else 'a'} {name}"


def is_whole(value: object) -> TypeGuard[int]:
    """Say whether a value is a whole number, of Python or of numpy. True and False are not."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_positive(name: str, value: object, unit: str = "") -> None:
    """Refuse a value that is not a finite number above 0.

    Raises:
        ConfigurationError: The value is refused. The message names the argument and the value.
    """
    if (
        isinstance(value, bool)
        or not isinstance(value, Real)
        or not (_is_finite(value) and float(value) > 0)
    ):
        raise ConfigurationError(f"{name} must be a positive number{unit}, not {value!r}")


def whole(name: str, value: object, least: int = 1) -> int:
    """Convert a whole number to an ``int``. Numbers of numpy are accepted; True and False are not.

    Raises:
        ConfigurationError: The value is something else, or is less than ``least``.
    """
    if not is_whole(value) or value < least:
        raise ConfigurationError(
            f"{name} must be a whole number of at least {least}, not {value!r}"
        )
    return int(value)


def number(name: str, value: object) -> float:
    """Convert a finite number to a ``float``.

    Numbers of numpy and tensors of one element are accepted; True and False are not.

    Raises:
        ConfigurationError: The value is something else.
    """
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Real) or not _is_finite(value):
        raise ConfigurationError(f"{name} must be a finite number, not {value!r}")
    return float(value)


def _is_finite(value: Real) -> bool:
    try:
        return math.isfinite(float(value))
    except OverflowError:  # a whole number that is too large
        return False


def yes_or_no(name: str, value: object) -> bool:
    """Return the value if it is True or False.

    Raises:
        ConfigurationError: The value is something else.
    """
    if not isinstance(value, bool):
        raise ConfigurationError(f"{name} must be True or False, not {value!r}")
    return value


def one_of(name: str, value: object, allowed: Iterable[str]) -> str:
    """Return the value if it is one of the allowed words.

    Raises:
        ConfigurationError: The value is something else.
    """
    words = [str(word) for word in allowed]
    if not isinstance(value, str) or value not in words:
        raise ConfigurationError(
            f"{name} must be one of {', '.join(map(repr, words))}, not {value!r}"
        )
    return str(value)


def check_identity(rank: int, world_size: int) -> tuple[int, int]:
    """Return the rank and the world size as plain integers.

    Raises:
        ConfigurationError: ``rank`` is not in ``range(world_size)``, or ``world_size`` is not
            allowed.
    """
    if not is_whole(world_size) or not 1 <= world_size <= MOST_RANKS:
        raise ConfigurationError(
            f"world_size must be a whole number from 1 to {MOST_RANKS}, not {world_size!r}"
        )
    if not is_whole(rank) or not 0 <= rank < world_size:
        raise ConfigurationError(
            f"rank must be a whole number from 0 to {world_size - 1} (world_size is {world_size}), "
            f"not {rank!r}"
        )
    return int(rank), int(world_size)


def check_resume(value: object) -> None:
    """Refuse a value of ``resume`` that is not allowed.

    Raises:
        ConfigurationError: The message says what was given and what is allowed.
    """
    if not (isinstance(value, bool) or value == "newest-whole"):
        raise ConfigurationError(f"resume must be False, True or 'newest-whole', not {value!r}")

"""Checks of arguments that several places share."""

from __future__ import annotations

import math

from ._errors import ConfigurationError


def check_positive(name: str, value: object, unit: str = "") -> None:
    """Refuse what is no finite number above 0.

    Raises:
        ConfigurationError: It names the argument and what was given.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not (math.isfinite(value) and value > 0):
        raise ConfigurationError(f"{name} must be a positive number{unit}, not {value!r}")


def check_whole(name: str, value: object) -> None:
    """Refuse what is no whole number of at least 1.

    Raises:
        ConfigurationError: It names the argument and what was given.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigurationError(f"{name} must be a whole number of at least 1, not {value!r}")

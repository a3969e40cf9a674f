"""The argument ``outer_lr``: a number, or a function that returns the learning rate of a sync."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from .._checks import number
from .._errors import ConfigurationError

LearningRate: TypeAlias = Callable[[int], float]

OF_THE_SYNC = "a function of the sync"
"""The setting ``outer_lr`` of loops whose learning rate is a function.

Replicas compare this text, and not what the function returns.
"""


def checked_lr(name: str, value: object) -> float:
    """A learning rate as a ``float``.

    Raises:
        ConfigurationError: It is not a finite number above 0. The message begins with ``name``.
    """
    lr = number(name, value)
    if not lr > 0:
        raise ConfigurationError(f"{name} must be positive, not {lr}; usual values are 0.4 to 1.0")
    return lr


def lr_of_sync(schedule: LearningRate, sync: int) -> float:
    """Return what the caller's function returns for a sync, counted from 1.

    Raises:
        ConfigurationError: It raises an error, or returns something else than a positive number.
    """
    try:
        value = schedule(sync)
    except Exception as error:
        raise ConfigurationError(
            f"outer_lr is a function, and outer_lr({sync}) raised {type(error).__name__}: {error}. "
            "It is called with the number of each outer step, from 1, and must return the learning "
            "rate of that step."
        ) from error
    return checked_lr(f"what outer_lr({sync}) returns", value)

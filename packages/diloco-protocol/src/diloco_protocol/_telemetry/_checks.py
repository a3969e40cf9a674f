"""The fields of telemetry records: what each may hold, for writers and readers alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any

from .._checks import is_number, or_none, shown
from .._errors import InvalidRequestError
from .._fields import LARGEST, LATEST
from .._options import check_flag, whole
from .._texts import readable

MOST_METRICS = 32
"""The most metrics of a replica."""
NAME_CHARACTERS = 64
"""The longest name of a metric."""
TEXT_CHARACTERS = 128
"""The longest text, of a metric or elsewhere."""
MOST_RANKS = 64
"""The most ranks, or numbers for one member each, that a record names."""

_LARGEST = 2**63 - 1

Metric = float | int | str
"""The value of a metric."""


class Phase(StrEnum):
    """What a replica does."""

    TRAINING = "training"
    CONTRIBUTING = "contributing"
    WAITING = "waiting"
    UPDATING = "updating"
    ADOPTING = "adopting"
    IDLE = "idle"


def check_metrics(metrics: object) -> dict[str, Metric]:
    """Return metrics as records hold them.

    NaN and infinities become the texts ``"nan"``, ``"inf"`` and ``"-inf"``, since JSON has no
    numbers for them. Control characters in texts are shown as Python writes them.

    Raises:
        InvalidRequestError: There are too many, or one has a name or a value that is not allowed.
            The error names it.
    """
    if not isinstance(metrics, Mapping) or len(metrics) > MOST_METRICS:
        size = len(metrics) if isinstance(metrics, Mapping) else shown(metrics)
        raise InvalidRequestError(f"metrics must be at most {MOST_METRICS} by name, not {size}")
    return {_check_name(name): _metric(name, value) for name, value in metrics.items()}


def _check_name(name: object) -> str:
    if type(name) is not str or not 0 < len(name) <= NAME_CHARACTERS or not name.isprintable():
        raise InvalidRequestError(
            f"the name of a metric must be printable text of 1 to {NAME_CHARACTERS} characters, "
            f"not {shown(name)}"
        )
    return name


def _metric(name: str, value: object) -> Metric:
    if type(value) is float:
        return value if math.isfinite(value) else str(value)
    if type(value) is int and -_LARGEST <= value <= _LARGEST:
        return value
    if type(value) is str and len(value) <= TEXT_CHARACTERS:
        return _text(name, value)
    raise InvalidRequestError(
        f"the metric {shown(name)} must be a float, an int from {-_LARGEST} to {_LARGEST}, or text "
        f"of at most {TEXT_CHARACTERS} characters, not {shown(value)} ({type(value).__name__})"
    )


def _text(name: str, value: object) -> str:
    """Return one line of harmless text, of which the end is cut off if it is too long."""
    if type(value) is not str:
        raise InvalidRequestError(f"{name} must be text, not {shown(value)}")
    line = readable(value[:TEXT_CHARACTERS]).replace("\n", " ").replace("\t", " ")
    return line[:TEXT_CHARACTERS]


def _number(name: str, value: object, most: float = _LARGEST) -> float:
    if type(value) not in {int, float} or not is_number(value) or not 0 <= value <= most:
        raise InvalidRequestError(f"{name} must be a number from 0 to {most:g}, not {shown(value)}")
    return float(value)


def _word(name: str, value: object) -> Phase:
    if not isinstance(value, str) or value not in list(Phase):
        raise InvalidRequestError(f"{name} must be one of {', '.join(Phase)}, not {shown(value)}")
    return Phase(value)


def _several(check: Callable[[str, object], Any]) -> Callable[[str, object], tuple[Any, ...]]:
    def checked(name: str, value: object) -> tuple[Any, ...]:
        if not isinstance(value, (list, tuple)) or len(value) > MOST_RANKS:
            raise InvalidRequestError(
                f"{name} must be a list of at most {MOST_RANKS}, not {shown(value)}"
            )
        return tuple(check(name, item) for item in value)

    return checked


_whole, _rank = whole(0, _LARGEST), whole(0, 99_999)
# By the names of the fields, or else by their types.
CHECKS: Mapping[str, Callable[[str, Any], Any]] = {
    "rank": _rank,
    "world_size": whole(1, 100_000),
    "attempt": or_none(whole(1, LARGEST)),
    "time": lambda name, value: _number(name, value, LATEST),
    "training_share": or_none(lambda name, value: _number(name, value, 1)),
    "waits_for": _several(_rank),
    "str": _text,
    "str | None": or_none(_text),
    "int": _whole,
    "int | None": or_none(_whole),
    "float": _number,
    "float | None": or_none(_number),
    "tuple[float, ...]": _several(_number),
    "bool": check_flag,
    "Phase": _word,
    "Mapping[str, Metric]": lambda _, value: check_metrics(value),
}

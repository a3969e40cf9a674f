"""How often telemetry is written, and how much of it."""

from __future__ import annotations

from ._records import HISTORY_BYTES

PUTS_PER_SECOND = 10
"""How many objects all replicas of a run together put per second at most, as a mean."""
LEAST_SECONDS = 10.0
"""The shortest time between two puts of the same ``live/`` object."""

_HISTORY_PER_LIVE = 6  # a history object is put at most once in the time of so many live ones
_SEALED_SHARE = 50
_SEALED_SECONDS = 600.0
_WEEK = 7 * 24 * 3600.0
_BYTES_AT_ONCE = 50 * HISTORY_BYTES
_BYTES_PER_WEEK = 100 * HISTORY_BYTES


def live_seconds(replicas: int, least: float = LEAST_SECONDS) -> float:
    """Return the seconds between two puts of a ``live/`` object in a run of so many replicas.

    All replicas together put at most :data:`PUTS_PER_SECOND` objects, ``history/`` included.
    """
    puts = 1 + 1 / _HISTORY_PER_LIVE
    return max(least, puts * replicas / PUTS_PER_SECOND)


def history_seconds(replicas: int, least: float = LEAST_SECONDS) -> float:
    """Return the least seconds between two puts of ``history/`` objects by one replica."""
    return _HISTORY_PER_LIVE * live_seconds(replicas, least)


def is_sealed(seconds: float, age: float) -> bool:
    """Return whether a ``history/`` object covers enough time, so that it is rewritten no more.

    That is a fiftieth of the incarnation's time, and ten minutes at least. The next line begins
    another object then, and also where it would make this one larger than :data:`HISTORY_BYTES`.

    Args:
        seconds: The time since the object before it was sealed, or since the incarnation began.
        age: The time since the incarnation began.
    """
    return seconds >= max(_SEALED_SECONDS, age / _SEALED_SHARE)


def history_allowance(age: float) -> float:
    """Return the most bytes of history that an incarnation of this age may have made in all.

    Beyond it lines are left out. So a week of a replica makes at most 500 objects, however fast it
    syncs: 50 MiB may come at any time, and 100 MiB in the course of a week.
    """
    return _BYTES_AT_ONCE + _BYTES_PER_WEEK * age / _WEEK

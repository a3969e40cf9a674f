"""Exit codes: pure functions."""

from __future__ import annotations

from collections.abc import Iterable

from diloco_protocol import (
    BackendError,
    DilocoError,
    InvalidRequestError,
    MissingDependencyError,
    ReplicaNotFoundError,
    ResultLostError,
)

SUCCEEDED, FAILED, BAD_USE, UNKNOWN, UNREACHABLE, FAULT = 0, 1, 2, 3, 4, 70


def exit_of_states(states: Iterable[str]) -> int:
    """Return the exit code for the states of a run's replicas.

    A run that goes on counts as succeeded so far. One that failed is known to have failed, even if
    other replicas are lost.

    Args:
        states: ``pending``, ``running``, ``succeeded``, ``failed``, ``cancelled`` or ``unknown``.
    """
    seen = set(states)
    if seen & {"pending", "running"}:
        return SUCCEEDED
    if seen & {"failed", "cancelled"}:
        return FAILED
    return UNKNOWN if "unknown" in seen else SUCCEEDED


def exit_of_error(error: Exception) -> int:
    """Return the exit code for an error that ended a verb."""
    if isinstance(error, (ReplicaNotFoundError, ResultLostError)):
        return UNKNOWN
    if not isinstance(error, DilocoError):
        return FAULT
    if isinstance(error, BackendError) and not isinstance(error, InvalidRequestError):
        return UNREACHABLE  # also where a backend's record is damaged, which some call a ValueError
    return BAD_USE if isinstance(error, (ValueError, MissingDependencyError)) else UNKNOWN

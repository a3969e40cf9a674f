"""Exit codes."""

import pytest

from diloco_cli._facts import exit_of_error, exit_of_states
from diloco_protocol import (
    AuthError,
    BackendError,
    DilocoError,
    InvalidRequestError,
    MissingDependencyError,
    ReplicaNotFoundError,
    ResultLostError,
    ThrottledError,
    UnavailableError,
)


class Damaged(BackendError, ValueError):
    """As diloco-local has for its files."""


class Configuration(DilocoError, ValueError):
    """As diloco-core has for its arguments."""


@pytest.mark.parametrize(
    ("states", "code"),
    [
        (["succeeded", "succeeded"], 0),
        (["running", "failed"], 0),
        (["pending", "unknown"], 0),
        (["succeeded", "failed"], 1),
        (["succeeded", "cancelled"], 1),
        (["failed", "unknown"], 1),
        (["succeeded", "unknown"], 3),
    ],
)
def test_of_states(states, code):
    assert exit_of_states(states) == code


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidRequestError("x"), 2),
        (MissingDependencyError("x"), 2),
        (ReplicaNotFoundError("x"), 3),
        (ResultLostError("x"), 3),
        (DilocoError("x"), 3),
        (UnavailableError("x"), 4),
        (ThrottledError("x"), 4),
        (AuthError("x"), 4),
        (BackendError("x"), 4),
        (Damaged("x"), 4),
        (Configuration("x"), 2),
        (RuntimeError("x"), 70),
        (KeyError("x"), 70),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "x"), 70),
    ],
)
def test_of_errors(error, code):
    assert exit_of_error(error) == code

"""Environment variables: those that the protocol sets, and those that a caller may set."""

from __future__ import annotations

import re

from ._checks import check_texts, shown
from ._errors import InvalidRequestError

RANK_VARIABLE = "REPLICA_RANK"
WORLD_SIZE_VARIABLE = "REPLICA_WORLD_SIZE"
RENDEZVOUS_VARIABLE = "RENDEZVOUS_URI"
RUN_ID_VARIABLE = "DILOCO_RUN_ID"
COHORT_VARIABLE = "DILOCO_COHORT"
ATTEMPT_VARIABLE = "DILOCO_ATTEMPT"
RESTARTS_VARIABLE = "DILOCO_RESTARTS"
"""1 or 0: whether a replica that has ended can be started again. Not set if that is not known."""
LAST_ATTEMPT_VARIABLE = "DILOCO_LAST_ATTEMPT"
"""1 if nothing starts the replica again when this attempt fails. Not set if that is not known."""
BACKEND_VARIABLE = "DILOCO_BACKEND"
"""Name of the backend that has started the replica. Not set if that is not known."""
PLACE_VARIABLE = "DILOCO_PLACE"
"""Where the backend runs the replica, such as a region. Not set if that is not known."""
SPEC_PREFIX = "DILOCO_SPEC_"
"""Prefix of the names of the variables that carry a spec, piece by piece."""

_RESERVED = frozenset(
    {
        RANK_VARIABLE,
        WORLD_SIZE_VARIABLE,
        RENDEZVOUS_VARIABLE,
        RUN_ID_VARIABLE,
        COHORT_VARIABLE,
        ATTEMPT_VARIABLE,
        RESTARTS_VARIABLE,
        LAST_ATTEMPT_VARIABLE,
        BACKEND_VARIABLE,
        PLACE_VARIABLE,
    }
)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Bytes of NAME=value: Linux refuses to start a program with a longer one (MAX_ARG_STRLEN).
_LONGEST = 131_071


def is_reserved(name: str) -> bool:
    """Return whether the protocol itself sets an environment variable, so that a caller may not."""
    return name in _RESERVED or name.startswith(SPEC_PREFIX)


def is_variable_name(name: str) -> bool:
    """Return whether every shell and container accepts a name for an environment variable."""
    return _NAME.fullmatch(name) is not None


def check_variables(name: str, values: object) -> dict[str, str]:
    """Check environment variables that a caller sets, and return them sorted by their names.

    None stands for an empty mapping.

    Args:
        name: Name of the mapping in the error.
        values: The mapping to check.

    Raises:
        InvalidRequestError: A name or value is not allowed for an environment variable, both
            together are too long for one, or the protocol itself sets the variable.
    """
    variables = check_texts(name, values)
    for key, value in variables.items():
        if not is_variable_name(key):
            raise InvalidRequestError(
                f"{name} has the name {shown(key)}: letters, digits and _ are allowed, and no "
                "digit at the beginning"
            )
        if is_reserved(key):
            raise InvalidRequestError(
                f"{name} may not set {shown(key)[1:-1]}: the launch itself sets it for every "
                "replica"
            )
        if "\0" in value:
            raise InvalidRequestError(
                f"{name}[{shown(key)}] contains a NUL character, which no environment can carry"
            )
        if (size := len(f"{key}={value}".encode())) > _LONGEST:
            raise InvalidRequestError(
                f"{name}[{shown(key)}] has {size} bytes with its name, and Linux takes {_LONGEST}: "
                "pass it in a file, or as an argument of the entrypoint"
            )
    return variables

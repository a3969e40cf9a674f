"""Show the requests that a launch would send, without the secrets in their encoded parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diloco_protocol import ReplicaSpec, spec_to_environment
from diloco_protocol.backend import (
    REDACTED,
    redact,
    redact_spec,
    variables_from_strings,
    variables_to_strings,
)

_PIECE = 2500


def redacted_job(job: Mapping[str, Any], spec: ReplicaSpec) -> dict[str, Any]:
    """Return a request without the secrets in its spec and its long variables.

    Both are encoded in its hyperparameters. ``plan`` itself removes the secrets from the rest.
    """
    long = variables_from_strings(job["HyperParameters"])
    shown = {name: redact(name, value) for name, value in long.items()}
    encoded = {
        **spec_to_environment(redact_spec(spec), piece_bytes=_PIECE),
        **variables_to_strings(shown, piece_bytes=_PIECE),
    }
    plain = {name: text for name, text in job["HyperParameters"].items() if not _is_piece(name)}
    return {**job, "HyperParameters": {**encoded, **plain}}


def _is_piece(name: str) -> bool:
    """Return whether a hyperparameter holds a piece of the spec, or of the long variables."""
    return name.rpartition("_")[2].isdecimal() and name.startswith(("DILOCO_SPEC_", "DILOCO_ENV_"))


def secret_names(job: Mapping[str, Any]) -> list[str]:
    """List variables with names like those of secrets.

    Every user with the permission to describe a job can read them.
    """
    return sorted(
        name
        for name, value in {
            **job.get("Environment", {}),
            **variables_from_strings(job["HyperParameters"]),
        }.items()
        if redact(name, value) == REDACTED
    )

"""Show the requests that a launch would send, without the secrets in their encoded parts."""

from __future__ import annotations

import re
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

from ._job_requests import PIECE

_PIECE_NAME = re.compile(r"DILOCO_(SPEC|ENV)_[0-9]+")  # of the spec, or of the long variables


def redacted_job(job: Mapping[str, Any], spec: ReplicaSpec) -> dict[str, Any]:
    """Return a request without the secrets in its spec and its long variables.

    Both are encoded in its hyperparameters. ``plan`` itself removes the secrets from the rest.
    """
    long = variables_from_strings(job["HyperParameters"])
    shown = {name: redact(name, value) for name, value in long.items()}
    encoded = {
        **spec_to_environment(redact_spec(spec), piece_bytes=PIECE),
        **variables_to_strings(shown, piece_bytes=PIECE),
    }
    strings = job["HyperParameters"].items()
    plain = {name: text for name, text in strings if not _PIECE_NAME.fullmatch(name)}
    return {**job, "HyperParameters": {**encoded, **plain}}


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

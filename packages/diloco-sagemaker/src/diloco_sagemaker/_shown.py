"""What a launch would send, to look at: without the secrets that somebody has put into it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diloco_protocol import ReplicaSpec, spec_to_environment
from diloco_protocol.backend import (
    REDACTED,
    redact,
    redact_spec,
    redact_text,
    variables_from_strings,
    variables_to_strings,
)

_PIECE = 2500


def shown_job(job: Mapping[str, Any], spec: ReplicaSpec) -> dict[str, Any]:
    """A request without secrets in its texts, its variables, and the spec that is encoded in its hyperparameters."""
    shown: dict[str, Any] = _texts(job)
    if "Environment" in shown:
        shown["Environment"] = {
            name: redact(name, value) for name, value in shown["Environment"].items()
        }
    long = {
        name: redact(name, value)
        for name, value in variables_from_strings(job["HyperParameters"]).items()
    }
    strings = {
        **spec_to_environment(redact_spec(spec), piece_bytes=_PIECE),
        **variables_to_strings(long, piece_bytes=_PIECE),
    }
    others = {
        name: value for name, value in shown["HyperParameters"].items() if not _is_piece(name)
    }
    return {**shown, "HyperParameters": {**strings, **others}}


def _is_piece(name: str) -> bool:
    """Whether a hyperparameter holds a piece of the spec, or of the long variables."""
    return name.rpartition("_")[2].isdecimal() and name.startswith(("DILOCO_SPEC_", "DILOCO_ENV_"))


def secret_names(job: Mapping[str, Any]) -> list[str]:
    """Variables whose names are like those of secrets; whoever may describe a job can read them."""
    return sorted(
        name
        for name, value in {
            **job.get("Environment", {}),
            **variables_from_strings(job["HyperParameters"]),
        }.items()
        if redact(name, value) == REDACTED
    )


def _texts(value: Any) -> Any:
    if isinstance(value, str):
        return redact_text(value)
    if isinstance(value, Mapping):
        return {key: _texts(inside) for key, inside in value.items()}
    if isinstance(value, list):
        return [_texts(inside) for inside in value]
    return value

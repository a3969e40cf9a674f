"""What a launch would send, to look at: without the secrets that somebody has put into it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from diloco_protocol import spec_to_environment
from diloco_protocol.backend import is_reserved, redact, redact_spec, redact_text

if TYPE_CHECKING:
    from diloco_protocol import ReplicaSpec


def shown_job(manifest: Mapping[str, Any], spec: ReplicaSpec) -> dict[str, Any]:
    """A Job without secrets in its texts, its variables, and the spec that is encoded in them."""
    shown: dict[str, Any] = _texts(manifest)
    pod = shown["spec"]["template"]["spec"]
    for container in [*pod["containers"], *pod.get("initContainers", [])]:
        for entry in container.get("env") or []:
            if "value" in entry:
                entry["value"] = redact(entry["name"], entry["value"])
    container = pod["containers"][0]
    container["env"] = _with_pieces(container["env"], redact_spec(spec))
    return shown


def shown_arguments(body: Mapping[str, Any], spec: ReplicaSpec) -> dict[str, Any]:
    """The ConfigMap of large arguments without secrets in them."""
    return {**body, "data": spec_to_environment(redact_spec(spec))}


def _with_pieces(env: list[dict[str, Any]], spec: ReplicaSpec) -> list[dict[str, Any]]:
    """The variables with the pieces of another spec, if they have pieces and not references to them."""
    places = [number for number, entry in enumerate(env) if _is_piece(entry)]
    if not places:
        return env
    pieces = [{"name": name, "value": value} for name, value in spec_to_environment(spec).items()]
    others = [entry for entry in env if not _is_piece(entry)]
    return [*others[: places[0]], *pieces, *others[places[0] :]]


def _is_piece(entry: Mapping[str, Any]) -> bool:
    return "value" in entry and is_reserved(entry["name"])


def _texts(value: Any) -> Any:
    if isinstance(value, str):
        return redact_text(value)
    if isinstance(value, Mapping):
        return {key: _texts(inside) for key, inside in value.items()}
    if isinstance(value, list):
        return [_texts(inside) for inside in value]
    return value

"""Checking a caller's pod template before it is used.

The template has to be JSON of a bounded depth and size, in the shape that the merging and the
launch rely on. The cluster checks everything else.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from diloco_protocol import InvalidRequestError
from diloco_protocol.backend import redact_and_cut, shown

from ._names import CONTAINER, check_key, check_labels, is_taken
from ._shape import misfit

Json = dict[str, Any]

# The items of lists. A field that is required distinguishes the items, as in Kubernetes' strategic
# merge patch.
# https://kubernetes.io/docs/tasks/manage-kubernetes-objects/update-api-object-kubectl-patch/
_NAMED: Json = {"name!": str}
_CONTAINER_ITEMS: Mapping[str, Json] = {
    "volumeMounts": {"mountPath!": str},
    "volumeDevices": {"devicePath!": str},
    "env": {**_NAMED, "value": str},
    "envFrom": {"prefix": str},
    "ports": {"containerPort!": int},
}
_CONTAINER: Json = {
    **_NAMED,
    **{field: [item] for field, item in _CONTAINER_ITEMS.items()},
    "resources": {"limits": {str: str}, "requests": {str: str}},
}
_POD_ITEMS: Mapping[str, Json] = {
    **dict.fromkeys(("containers", "initContainers"), _CONTAINER),
    **dict.fromkeys(("volumes", "imagePullSecrets", "resourceClaims", "schedulingGates"), _NAMED),
    "hostAliases": {"ip!": str},
    "topologySpreadConstraints": {"topologyKey!": str},
    "tolerations": {},
}
ITEMS: Mapping[str, Json] = {**_POD_ITEMS, **_CONTAINER_ITEMS, "claims": _NAMED}
_TEMPLATE = {
    "metadata!": {"labels!": {str: str}, "annotations!": {str: str}},
    "spec!": {field: [item] for field, item in _POD_ITEMS.items()},
}
_MOST_LEVELS = 60  # Kubernetes' own templates need about ten
_MOST_SIZE = 1_000_000  # values, and characters of texts and keys: a Job has no room for more
_LARGEST = 2**63
_HALF_A_PAIR = re.compile("[\ud800-\udfff]")
_SHOWN = 100  # characters of a key in a path


def check_overlay(name: str, value: object) -> Json:
    """Return a copy of a caller's pod template, so that later changes of it do not matter.

    Args:
        name: Name of the template in the error.
        value: The template.

    Raises:
        InvalidRequestError: The template is not JSON, too deep or too large, or has a part of the
            wrong type.
    """
    if not isinstance(value, Mapping):
        raise InvalidRequestError(
            f"{name} must be a mapping with 'metadata' and 'spec', not {shown(value)}"
        )
    overlay: Json = {"metadata": {}, "spec": {}, **_copied(value, name, 0, [_MOST_SIZE])}
    if isinstance(metadata := overlay["metadata"], dict):
        overlay["metadata"] = metadata = {"labels": {}, "annotations": {}, **metadata}
    if wrong := misfit(overlay, _TEMPLATE, name):
        raise InvalidRequestError(wrong)
    for place, part, allowed in (
        (name, overlay, ("metadata", "spec")),
        (f"{name}.metadata", metadata, ("labels", "annotations")),
    ):
        if unknown := part.keys() - set(allowed):
            raise InvalidRequestError(
                f"{place} may have {allowed[0]!r} and {allowed[1]!r}, as a pod template has, not "
                f"{shown(sorted(unknown))}"
            )
    check_labels(f"{name}.metadata.labels", metadata["labels"])
    for key in metadata["annotations"]:
        if is_taken(check_key(f"{name}.metadata.annotations", key)):
            raise InvalidRequestError(
                f"{name}.metadata.annotations may not set {key}: the launch or the Job controller "
                "sets it"
            )
    for container in overlay["spec"].get("containers") or []:
        for source in container.get("envFrom") or []:
            if container["name"] == CONTAINER and (source.get("prefix") or "").startswith(
                "DILOCO_"
            ):
                raise InvalidRequestError(
                    f"{name} may not have the prefix {shown(source['prefix'])} in envFrom of the "
                    f"container {CONTAINER!r}: the launch itself sets its variables that begin "
                    "with DILOCO_"
                )
    return overlay


def _copied(value: Any, path: str, depth: int, room: list[int]) -> Any:
    """Return the same JSON value, made of JSON's own types only."""
    room[0] -= 1 + (len(value) if type(value) is str else 0)
    if depth > _MOST_LEVELS or room[0] < 0:
        raise InvalidRequestError(
            f"{path} is beyond what a pod template may hold: {_MOST_LEVELS} levels, and "
            f"{_MOST_SIZE} values and characters"
        )
    if isinstance(value, Mapping):
        for key in value:
            if type(key) is not str or key.startswith("$"):
                raise InvalidRequestError(
                    f"{path} has the key {shown(key)}: keys must be text, and patch directives "
                    "($...) are not supported"
                )
        return {
            _copied(key, f"a key of {path}", depth, room): _copied(
                inside,
                f"{path}.{key if len(key) <= _SHOWN else redact_and_cut(key, _SHOWN)}",
                depth + 1,
                room,
            )
            for key, inside in value.items()
        }
    if type(value) is list:
        return [
            _copied(item, f"{path}[{number}]", depth + 1, room) for number, item in enumerate(value)
        ]
    if type(value) is str and _HALF_A_PAIR.search(value):
        raise InvalidRequestError(
            f"{path} contains half of a surrogate pair, which cannot be sent as text"
        )
    if (type(value) is float and not math.isfinite(value)) or (
        type(value) is int and not -_LARGEST <= value < _LARGEST
    ):
        raise InvalidRequestError(f"{path} is {shown(value)}, which no manifest can hold")
    if value is None or type(value) in {str, bool, int, float}:
        return value
    raise InvalidRequestError(f"{path} is a {type(value).__name__}; a manifest holds JSON values")

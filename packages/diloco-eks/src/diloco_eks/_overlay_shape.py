"""The one look at a caller's pod template before anything is made of it.

It has to be JSON of a bounded depth and size, in the shape that the merging and the launch rely on. All else the cluster checks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from diloco_protocol import InvalidRequestError
from diloco_protocol.backend import shown

from ._names import CONTAINER, check_key, check_labels, is_taken

Json = dict[str, Any]

# The field that tells the items of a list apart, as in Kubernetes' strategic merge patch; None where none does.
# https://kubernetes.io/docs/tasks/manage-kubernetes-objects/update-api-object-kubectl-patch/
_POD_LISTS = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "imagePullSecrets": "name",
    "hostAliases": "ip",
    "resourceClaims": "name",
    "schedulingGates": "name",
    "topologySpreadConstraints": "topologyKey",
    "tolerations": None,
}
_CONTAINER_LISTS = {
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "env": "name",
    "envFrom": None,
    "ports": "containerPort",
}
LISTS: Mapping[str, str | None] = {**_POD_LISTS, **_CONTAINER_LISTS, "claims": "name"}
_TEMPLATE_FIELDS = frozenset({"metadata", "spec"})
_METADATA_FIELDS = frozenset({"labels", "annotations"})
_MOST_LEVELS = 60  # of which Kubernetes' own templates need about ten
_MOST_SIZE = 1_000_000  # values, and characters of texts and keys: a Job has no room for more
_LARGEST = 2**63
_HALF_A_PAIR = re.compile("[\ud800-\udfff]")
_SHOWN = 100  # characters of a key in a path


def check_overlay(name: str, value: object) -> Json:
    """Return a copy of a caller's pod template; what becomes of the original later does not matter.

    Args:
        name: What to call it in the error.
        value: What was given.

    Raises:
        InvalidRequestError: It is no JSON, too deep or too large, or has a part of the wrong type.
    """
    if not isinstance(value, Mapping):
        raise InvalidRequestError(
            f"{name} must be a mapping with 'metadata' and 'spec', not {shown(value)}"
        )
    overlay: Json = _copied(value, name, 0, [_MOST_SIZE])
    if unknown := overlay.keys() - _TEMPLATE_FIELDS:
        raise InvalidRequestError(
            f"{name} has {', '.join(sorted(unknown))}; it is a pod template with 'metadata' and 'spec'"
        )
    metadata = _part(overlay, "metadata", name)
    if unknown := metadata.keys() - _METADATA_FIELDS:
        raise InvalidRequestError(
            f"{name}.metadata may have 'labels' and 'annotations', not {', '.join(sorted(unknown))}"
        )
    check_labels(f"{name}.metadata.labels", _part(metadata, "labels", f"{name}.metadata"))
    _check_annotations(_part(metadata, "annotations", f"{name}.metadata"), f"{name}.metadata")
    spec, place = _part(overlay, "spec", name), f"{name}.spec"
    for field in _POD_LISTS:
        items = _items(spec, field, place)
        if field in {"containers", "initContainers"}:
            for container in items:
                _check_container(container, f"{place}.{field}[{container['name']}]")
    return overlay


def check_item(item: object, key: str | None, place: str) -> None:
    """Refuse an item of a list that is no mapping, or lacks what tells it from the others.

    Raises:
        InvalidRequestError: It is such an item. Of its values none is shown: they may be secrets.
    """
    wanted, called = (int, "a whole number") if key == "containerPort" else (str, "text")
    if not isinstance(item, dict):
        given = f"a {type(item).__name__}"
    elif key is not None and type(item.get(key)) is not wanted:
        given = f"one with {shown(sorted(item))}"
    else:
        return
    needed = "" if key is None else f" with {key!r}, which is {called}"
    raise InvalidRequestError(f"{place} must be a mapping{needed}, not {given}")


def _copied(value: Any, path: str, depth: int, room: list[int]) -> Any:
    """Return the same JSON value, made of nothing but JSON's own types."""
    room[0] -= 1 + (len(value) if type(value) is str else 0)
    if depth > _MOST_LEVELS or room[0] < 0:
        raise InvalidRequestError(
            f"{path} is beyond what a pod template may hold: {_MOST_LEVELS} levels, and {_MOST_SIZE} values and characters"
        )
    if isinstance(value, Mapping):
        copied = {}
        for key, inside in value.items():
            if type(key) is not str or key.startswith("$"):
                raise InvalidRequestError(
                    f"{path} has the key {shown(key)}: keys must be text, and patch directives ($...) are not supported"
                )
            place = f"{path}.{key[:_SHOWN]}"
            copied[_copied(key, f"a key of {path}", depth, room)] = _copied(
                inside, place, depth + 1, room
            )
        return copied
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


def _part(whole: Json, field: str, place: str, *, none: bool = False) -> Json:
    """Return a mapping in a mapping; an empty one if it has none, or if it has None and may."""
    part = whole.get(field, {})
    if part is None and none:
        return {}
    if not isinstance(part, dict):
        hint = ": the launch needs what it sets there itself" if part is None else ""
        raise InvalidRequestError(
            f"{place}.{field} must be a mapping, not a {type(part).__name__}{hint}"
        )
    return part


def _items(whole: Json, field: str, place: str) -> list[Json]:
    """Return the items of a list in a mapping, if it has one; None stands for the removal of ours."""
    items = whole.get(field)
    if items is not None and not isinstance(items, list):
        raise InvalidRequestError(
            f"{place}.{field} must be a list of mappings, not a {type(items).__name__}"
        )
    for number, item in enumerate(items or []):
        check_item(item, LISTS[field], f"{place}.{field}[{number}]")
    return items or []


def _check_annotations(annotations: Json, place: str) -> None:
    for key, text in annotations.items():
        check_key(f"{place}.annotations", key)
        if is_taken(key):
            raise InvalidRequestError(
                f"{place}.annotations may not set {key}: the launch or the Job controller sets it"
            )
        if not isinstance(text, (str, type(None))):
            raise InvalidRequestError(
                f"{place}.annotations[{key!r}] must be text, not a {type(text).__name__}: put it in quotes"
            )


def _check_container(container: Json, place: str) -> None:
    # Values are not shown: those of variables may be secrets.
    lists = {field: _items(container, field, place) for field in _CONTAINER_LISTS}
    for entry in lists["env"]:
        if not isinstance(entry.get("value", ""), (str, type(None))):
            raise InvalidRequestError(
                f"the variable {entry['name']} of {place} must be text, not a "
                f"{type(entry['value']).__name__}: put it in quotes"
            )
    for source in lists["envFrom"]:
        prefix = source.get("prefix", "")
        if not isinstance(prefix, str) or (
            container["name"] == CONTAINER and prefix.startswith("DILOCO_")
        ):
            raise InvalidRequestError(
                f"{place}.envFrom may not have the prefix {shown(prefix)}: it must be text, and the launch itself sets the "
                "variables of a replica that begin with DILOCO_"
            )
    resources = _part(container, "resources", place, none=True)
    for kind in ("limits", "requests"):
        amounts = _part(resources, kind, f"{place}.resources", none=True)
        for resource, amount in amounts.items():
            if not isinstance(amount, (str, type(None))):
                raise InvalidRequestError(
                    f"{kind} of {resource} of {place} must be text such as '1', not a {type(amount).__name__}"
                )

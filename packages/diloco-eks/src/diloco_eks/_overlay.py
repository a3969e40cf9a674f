"""Merging a caller's pod template over ours, by the names of the items in its lists."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from diloco_protocol import InvalidRequestError
from diloco_protocol.backend import shown

from ._environment import check_free
from ._names import CONTAINER, check_labels

# The field that tells the items of a list apart, as in Kubernetes' strategic merge patch.
# https://kubernetes.io/docs/tasks/manage-kubernetes-objects/update-api-object-kubectl-patch/
_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "env": "name",
    "envFrom": None,
    "imagePullSecrets": "name",
    "ports": "containerPort",
    "hostAliases": "ip",
    "resourceClaims": "name",
    "claims": "name",
    "schedulingGates": "name",
    "topologySpreadConstraints": "topologyKey",
    "tolerations": None,
}
_OURS = ("command", "args", "terminationMessagePath", "terminationMessagePolicy")
_TEMPLATE_FIELDS = frozenset({"metadata", "spec"})
_METADATA_FIELDS = frozenset({"labels", "annotations"})


def apply_overlay(template: Mapping[str, Any], overlay: Mapping[str, Any] | None) -> dict[str, Any]:
    """A pod template with another one merged into it; neither is changed.

    Mappings are merged; None removes; lists of named items (containers, volumes, environment, …) are merged by name;
    tolerations are added; any other list replaces ours.

    Raises:
        InvalidRequestError: The overlay has the wrong shape, or changes what the launch depends on.
    """
    merged = copy.deepcopy(dict(template))
    if not overlay:
        return merged
    _check_shape(overlay)
    _merge(merged, copy.deepcopy(dict(overlay)), "pod_overlay")
    _check_kept(template, merged)
    return merged


def _check_shape(overlay: Mapping[str, Any]) -> None:
    if not isinstance(overlay, Mapping):
        raise InvalidRequestError(
            f"pod_overlay must be a mapping with 'metadata' and 'spec', not {shown(overlay)}"
        )
    if unknown := overlay.keys() - _TEMPLATE_FIELDS:
        raise InvalidRequestError(
            f"pod_overlay has {', '.join(sorted(map(str, unknown)))}; it is a pod template with 'metadata' and 'spec'"
        )
    metadata = overlay.get("metadata") or {}
    if not isinstance(metadata, Mapping) or metadata.keys() - _METADATA_FIELDS:
        raise InvalidRequestError(
            f"pod_overlay.metadata may have 'labels' and 'annotations', not {shown(metadata)}"
        )
    check_labels("pod_overlay.metadata.labels", metadata.get("labels") or {})


def _merge(base: dict[str, Any], patch: Mapping[str, Any], path: str) -> None:
    for key, value in patch.items():
        place = f"{path}.{key}"
        if not isinstance(key, str) or key.startswith("$"):
            raise InvalidRequestError(
                f"{path} has the key {key!r}: keys must be text, and patch directives ($...) are not supported"
            )
        _check_value(value, place)
        if value is None:
            base.pop(key, None)
            continue
        ours = base.get(key)
        if ours is not None and type(ours) is not type(value):
            raise InvalidRequestError(
                f"{place} must be a {type(ours).__name__}, not a {type(value).__name__}"
            )
        if isinstance(value, dict):
            inside = base.setdefault(key, {})
            _merge(inside, value, place)
        elif isinstance(value, list) and key in _KEYS:
            base[key] = _merge_list(ours or [], value, _KEYS[key], place)
        else:
            base[key] = value


def _merge_list(ours: list[Any], items: list[Any], key: str | None, path: str) -> list[Any]:
    merged = list(ours)
    for number, item in enumerate(items):
        place = f"{path}[{number}]"
        if not isinstance(item, dict) or (key is not None and item.get(key) is None):
            raise InvalidRequestError(
                f"{place} must be a mapping"
                + (f" with {key!r}" if key else "")
                + f", not {shown(item)}"
            )
        known = [known for known in merged if key is not None and known.get(key) == item[key]]
        if known and "valueFrom" in item:
            known[0].pop("value", None)
        if known and "value" in item:
            known[0].pop("valueFrom", None)
        if known:
            _merge(known[0], item, place)
        elif item not in merged:
            fresh: dict[str, Any] = {}
            _merge(fresh, item, place)
            merged.append(fresh)
    return merged


def _check_value(value: Any, path: str) -> None:
    if value is None or type(value) in {str, bool, int, float, dict}:
        return
    if type(value) is list:
        for number, item in enumerate(value):
            _check_value(item, f"{path}[{number}]")
        return
    raise InvalidRequestError(f"{path} is a {type(value).__name__}; a manifest holds JSON values")


def _check_kept(template: Mapping[str, Any], merged: Mapping[str, Any]) -> None:
    spec = merged["spec"]
    if spec.get("restartPolicy") != "Never":
        raise InvalidRequestError(
            "pod_overlay.spec.restartPolicy cannot be changed: the logs of a failed pod would be lost with it"
        )
    containers = [*spec.get("containers", []), *spec.get("initContainers", [])]
    ours = template["spec"]["containers"][0]
    replica = next(
        (each for each in spec.get("containers", []) if each["name"] == CONTAINER),
        None,
    )
    if replica is None:
        raise InvalidRequestError(f"pod_overlay may not remove the container {CONTAINER!r}")
    for field in _OURS:
        if replica.get(field) != ours.get(field):
            hint = "; command= of the executor sets it" if field == "command" else ""
            raise InvalidRequestError(
                f"pod_overlay may not set {field} of the container {CONTAINER!r}{hint}"
            )
    variables = {entry["name"]: entry for entry in replica.get("env", [])}
    for entry in ours["env"]:
        if variables.get(entry["name"]) != entry:
            raise InvalidRequestError(
                f"pod_overlay changes the variable {entry['name']} of the container {CONTAINER!r}: use env= or secrets="
            )
    for name in variables.keys() - {entry["name"] for entry in ours["env"]}:
        check_free(str(name))
    for each in containers:
        _check_texts(each)


def _check_texts(container: Mapping[str, Any]) -> None:
    name = container.get("name")
    for entry in container.get("env") or []:
        if "value" in entry and not isinstance(entry["value"], str):
            raise InvalidRequestError(
                f"the variable {entry['name']} of container {name!r} must be text, not a "
                f"{type(entry['value']).__name__}: put it in quotes"
            )
    for kind in ("limits", "requests"):
        for resource, amount in ((container.get("resources") or {}).get(kind) or {}).items():
            if not isinstance(amount, str):
                raise InvalidRequestError(
                    f"{kind} of {resource} of container {name!r} must be text such as '1': {shown(amount)}"
                )

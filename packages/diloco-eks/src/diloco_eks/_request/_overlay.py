"""Merging a caller's pod template into ours, by the names of the items in its lists.

Only what the merging and the launch rely on is checked here; the cluster checks everything else
before it creates anything.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from diloco_protocol import InvalidRequestError
from diloco_protocol.backend import check_json, shown

from ._environment import check_free
from ._names import CONTAINER, check_key, check_labels, is_taken
from ._shape import misfit

Json = dict[str, Any]

# The field that distinguishes the items of a list, as in Kubernetes' strategic merge patch; empty
# where items are only added.
# https://kubernetes.io/docs/tasks/manage-kubernetes-objects/update-api-object-kubectl-patch/
_KEYS: Mapping[str, str] = {
    **dict.fromkeys(("containers", "initContainers", "volumes", "env", "claims"), "name"),
    **dict.fromkeys(("imagePullSecrets", "resourceClaims", "schedulingGates"), "name"),
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "ports": "containerPort",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
    "tolerations": "",
    "envFrom": "",
}
_TEMPLATE = {
    "metadata!": {"labels!": {str: str}, "annotations!": {str: str}},
    "spec!": {"containers": [{"name!": str}]},
}
_OURS = (
    "name",
    "command",
    "args",
    "terminationMessagePath",
    "terminationMessagePolicy",
    # For a container: it would restart inside its pod, which then never ends.
    "restartPolicy",
    "restartPolicyRules",
)


def check_overlay(name: str, value: object) -> Json:
    """Return a copy of a caller's pod template, so that later changes of it do not matter.

    Args:
        name: Name of the template in the error.
        value: The template.

    Raises:
        InvalidRequestError: The template is not JSON, has a part of the wrong type, or sets labels
            or annotations of the launch.
    """
    check_json(value, name)
    copied = _copy(value)
    if wrong := misfit(copied, {}, name):
        raise InvalidRequestError(f"{wrong}: a pod template with 'metadata' and 'spec' is needed")
    overlay: Json = {"metadata": {}, "spec": {}, **copied}
    if isinstance(metadata := overlay["metadata"], dict):
        overlay["metadata"] = metadata = {"labels": {}, "annotations": {}, **metadata}
    if wrong := misfit(overlay, _TEMPLATE, name):
        raise InvalidRequestError(wrong)
    unknown = overlay.keys() - {"metadata", "spec"} or metadata.keys() - {"labels", "annotations"}
    if unknown:
        raise InvalidRequestError(
            f"{name} may have 'metadata' (with 'labels' and 'annotations') and 'spec', as a pod "
            f"template has, not {shown(sorted(unknown))}"
        )
    check_labels(f"{name}.metadata.labels", metadata["labels"])
    for key in metadata["annotations"]:
        if is_taken(check_key(f"{name}.metadata.annotations", key)):
            raise InvalidRequestError(
                f"{name}.metadata.annotations may not set {key}: the launch or the Job controller "
                "sets it"
            )
    return overlay


def apply_overlay(template: Mapping[str, Any], overlay: Mapping[str, Any] | None) -> Json:
    """Return a pod template with another one merged into it; neither is changed.

    Mappings are merged; None removes a key; lists of named items (containers, volumes, environment,
    …) are merged by name; tolerations are added; any other list replaces ours.

    Args:
        template: Our template.
        overlay: The caller's template, which :func:`check_overlay` has accepted.

    Raises:
        InvalidRequestError: The overlay does not fit our template, or changes something that the
            launch depends on.
    """
    merged: Json = _copy(template)
    if overlay:
        _merge(merged, _copy(overlay), "pod_overlay")
        _check_kept(template, merged)
    return merged


def _copy(value: object) -> Any:
    return json.loads(json.dumps(value))


def _merge(base: Json, patch: Mapping[str, Any], path: str) -> None:
    for key, value in patch.items():
        if value is None:
            base.pop(key, None)
            continue
        place, known = f"{path}.{key}", base.get(key)
        kind = list if key in _KEYS else type(value if known is None else known)
        if wrong := misfit(value, kind, place):
            raise InvalidRequestError(wrong)
        if isinstance(value, dict):
            _merge(base.setdefault(key, {}), value, place)
        elif key in _KEYS:
            base[key] = _merge_list(known or [], value, _KEYS[key], place)
        else:
            base[key] = value


def _merge_list(base: list[Any], items: list[Any], key: str, path: str) -> list[Any]:
    merged = list(base)
    for number, item in enumerate(items):
        place = f"{path}[{number}]"
        if wrong := misfit(item, {f"{key}!": str} if key == "name" else {}, place):
            raise InvalidRequestError(wrong)
        known = next((known for known in merged if key and known.get(key) == item.get(key)), None)
        if known is not None:
            for field, other in (("valueFrom", "value"), ("value", "valueFrom")):
                if field in item:
                    known.pop(other, None)
            _merge(known, item, place)
        elif item not in merged:
            fresh: Json = {}
            _merge(fresh, item, place)
            merged.append(fresh)
    return merged


def _check_kept(template: Mapping[str, Any], merged: Mapping[str, Any]) -> None:
    ours = template["spec"]["containers"][0]
    containers = merged["spec"].get("containers") or []
    replica: Json = next((item for item in containers if item["name"] == CONTAINER), {})
    fields = [field for field in _OURS if replica.get(field) != ours.get(field)]
    if fields:
        hint = "; command= of the executor sets it" if "command" in fields else ""
        raise InvalidRequestError(
            f"pod_overlay may not set or remove {fields[0]} of the container {CONTAINER!r}{hint}"
        )
    variables = {entry["name"]: entry for entry in replica.get("env") or []}
    for entry in ours["env"]:
        if variables.pop(entry["name"], None) != entry:
            raise InvalidRequestError(
                f"pod_overlay changes the variable {entry['name']} of the container {CONTAINER!r}: "
                "use env= or secrets="
            )
    for name in variables:
        check_free(name)

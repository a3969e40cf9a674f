"""Merging a caller's pod template into ours, by the names of the items in its lists."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from diloco_protocol import InvalidRequestError
from diloco_protocol.backend import shown

from ._environment import check_free
from ._names import CONTAINER
from ._overlay_shape import ITEMS
from ._shape import misfit

_OURS = (
    "command",
    "args",
    "terminationMessagePath",
    "terminationMessagePolicy",
    # For a container: it would restart inside its pod, which then never ends.
    "restartPolicy",
    "restartPolicyRules",
)


def apply_overlay(template: Mapping[str, Any], overlay: Mapping[str, Any] | None) -> dict[str, Any]:
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
    merged = copy.deepcopy(dict(template))
    if not overlay:
        return merged
    _merge(merged, copy.deepcopy(dict(overlay)), "pod_overlay")
    _check_kept(template, merged)
    return merged


def _merge(base: dict[str, Any], patch: Mapping[str, Any], path: str) -> None:
    for key, value in patch.items():
        place = f"{path}.{key}"
        if value is None:
            base.pop(key, None)
            continue
        base_value = base.get(key)
        if base_value is not None and type(base_value) is not type(value):
            raise InvalidRequestError(
                f"{place} must be a {type(base_value).__name__}, not a {type(value).__name__}"
            )
        if isinstance(value, dict):
            inside = base.setdefault(key, {})
            _merge(inside, value, place)
        elif isinstance(value, list) and key in ITEMS:
            base[key] = _merge_list(base_value or [], value, ITEMS[key], place)
        else:
            base[key] = value


def _merge_list(base: list[Any], items: list[Any], schema: dict[str, Any], path: str) -> list[Any]:
    if wrong := misfit(items, [schema], path):
        raise InvalidRequestError(wrong)
    merged = list(base)
    key = next((field.rstrip("!") for field in schema if field.endswith("!")), None)
    for number, item in enumerate(items):
        place = f"{path}[{number}]"
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


def _check_kept(template: Mapping[str, Any], merged: Mapping[str, Any]) -> None:
    spec = merged["spec"]
    if spec.get("restartPolicy") != "Never":
        raise InvalidRequestError(
            "pod_overlay.spec.restartPolicy cannot be changed: the logs of a failed pod would be "
            "lost with it"
        )
    for volume in spec.get("volumes", []):
        if len(volume) > 2:  # its name and one source
            raise InvalidRequestError(
                f"with pod_overlay the volume {shown(volume['name'])} has several sources "
                f"({shown(sorted(volume.keys() - {'name'}))}). The executor may have a volume of "
                "that name: choose another one"
            )
    template_container = template["spec"]["containers"][0]
    replica = next(
        (container for container in spec.get("containers", []) if container["name"] == CONTAINER),
        None,
    )
    if replica is None:
        raise InvalidRequestError(f"pod_overlay may not remove the container {CONTAINER!r}")
    for field in _OURS:
        if replica.get(field) != template_container.get(field):
            hint = "; command= of the executor sets it" if field == "command" else ""
            raise InvalidRequestError(
                f"pod_overlay may not set {field} of the container {CONTAINER!r}{hint}"
            )
    variables = {entry["name"]: entry for entry in replica.get("env", [])}
    for entry in template_container["env"]:
        if variables.get(entry["name"]) != entry:
            raise InvalidRequestError(
                f"pod_overlay changes the variable {entry['name']} of the container {CONTAINER!r}: "
                "use env= or secrets="
            )
    for name in variables.keys() - {entry["name"] for entry in template_container["env"]}:
        check_free(name)

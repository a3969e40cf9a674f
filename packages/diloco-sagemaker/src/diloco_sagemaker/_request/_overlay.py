"""Merge a caller's fields of CreateTrainingJob over the executor's own."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from diloco_protocol import InvalidRequestError
from diloco_protocol.backend import is_reserved, variables_from_strings

from . import _names as names

#: Fields that an overlay must not set, since the launch depends on them, and the reason for each.
_OURS = {
    ("TrainingJobName",): "it is the launch's idempotency key",
    ("AlgorithmSpecification", "TrainingImage"): "image_uri= sets it",
    ("AlgorithmSpecification", "ContainerEntrypoint"): "command= sets it",
    ("AlgorithmSpecification", "ContainerArguments"): "the runner needs them",
    ("AlgorithmSpecification", "AlgorithmName"): "replicas need an image",
    ("OutputDataConfig", "S3OutputPath"): "output_s3_path= sets it",
    ("OutputDataConfig", "CompressionType"): "results are read as plain files",
    ("ResourceConfig", "InstanceCount"): "each replica is a job of one instance",
    ("ResourceConfig", "InstanceGroups"): "each replica is a job of one instance",
    ("ResourceConfig", "InstanceType"): "gpu= or the options choose it",
    ("ResourceConfig", "InstancePreferences"): "instance_preferences= sets it",
    ("CheckpointConfig", "LocalPath"): "attempts are counted in /opt/ml/checkpoints",
    ("CheckpointConfig", "S3Uri"): "checkpoint_s3_path= sets it",
    ("StoppingCondition", "MaxRuntimeInSeconds"): "it follows from timeout= and max_restarts=",
    ("EnableManagedSpotTraining",): "spot= sets it",
    ("RetryStrategy",): "platform_retries= sets it",
    ("EnableNetworkIsolation",): "isolated replicas could not reach their rendezvous",
    ("RoleArn",): "role_arn= sets it",
}


def apply_overlay(request: dict[str, Any], overlay: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a request with the caller's fields merged into it; neither argument is changed.

    Mappings are merged, tags are added, and everything else replaces the executor's own value. None
    removes a field.

    Raises:
        InvalidRequestError: The overlay would change something that the launch depends on.
    """
    if not overlay:
        return request
    for path, why in _OURS.items():
        if _has(overlay, path):
            raise InvalidRequestError(f"request_overlay may not set {'.'.join(path)}: {why}")
    merged = copy.deepcopy(request)
    _merge(merged, copy.deepcopy(dict(overlay)), "request_overlay")
    return merged


def _has(overlay: Mapping[str, Any], path: tuple[str, ...]) -> bool:
    value: Any = overlay
    for number, key in enumerate(path):
        if not isinstance(value, Mapping):
            # Something else in place of the mapping would remove the executor's field.
            return number > 0
        if key not in value:
            return False
        value = value[key]
    return True


def _merge(base: dict[str, Any], patch: Mapping[str, Any], path: str) -> None:
    for key, value in patch.items():
        place = f"{path}.{key}"
        if key in {"Tags", "HyperParameters", "Environment"} and path == "request_overlay":
            _add(base, key, value, place)
        elif value is None:
            base.pop(key, None)
        elif isinstance(value, Mapping) and isinstance(base.get(key), dict):
            _merge(base[key], value, place)
        else:
            base[key] = value


def _add(base: dict[str, Any], key: str, value: Any, place: str) -> None:
    """Add tags, variables or hyperparameters; none that the launch sets may be replaced."""
    if key == "Tags":
        if not isinstance(value, list) or not all(
            isinstance(tag, Mapping)
            and tag.keys() == {"Key", "Value"}
            and isinstance(tag["Key"], str)
            for tag in value
        ):
            raise InvalidRequestError(
                f"{place} must be a list of mappings with 'Key' and 'Value', which are text, and "
                "is something else"
            )
        new_keys = [tag["Key"] for tag in value]
        if len(set(new_keys)) < len(new_keys):
            raise InvalidRequestError(f"{place} has a key twice: {', '.join(sorted(new_keys))}")
        taken_keys, is_set_by_launch = {tag["Key"] for tag in base.get("Tags", [])}, _is_our_tag
    else:
        if not isinstance(value, Mapping):
            raise InvalidRequestError(
                f"{place} must be a mapping of text to text, not a value of type "
                f"{type(value).__name__}"
            )
        new_keys, taken_keys = list(value), set(base.get(key, {}))
        if key == "Environment":  # variables in hyperparameters would win over it
            taken_keys |= variables_from_strings(base.get("HyperParameters", {})).keys()
        is_set_by_launch = is_reserved if key == "Environment" else _is_our_string
    if twice := sorted(name for name in new_keys if name in taken_keys or is_set_by_launch(name)):
        raise InvalidRequestError(f"{place} may not set {', '.join(twice)}: the launch does")
    base[key] = [*base.get(key, []), *value] if key == "Tags" else {**base.get(key, {}), **value}


def _is_our_tag(name: str) -> bool:
    return name.lower().startswith((names.TAG_PREFIX, "aws:"))


def _is_our_string(name: str) -> bool:
    """Return whether a hyperparameter belongs to the spec of a replica or the record of a launch.

    This includes names that this launch does not need, since its spec is shorter.
    """
    return name.upper().startswith(names.STRING_PREFIX)

"""Merge a caller's fields of CreateTrainingJob over the executor's own."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from diloco_protocol import InvalidRequestError

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
    ("CheckpointConfig", "LocalPath"): "attempts are counted in /opt/ml/checkpoints",
    ("CheckpointConfig", "S3Uri"): "checkpoint_s3_path= sets it",
    ("StoppingCondition", "MaxRuntimeInSeconds"): "it follows from timeout= and max_restarts=",
    ("EnableManagedSpotTraining",): "spot= sets it",
    ("RetryStrategy",): "platform_retries= sets it",
    ("EnableNetworkIsolation",): "isolated replicas could not reach their rendezvous",
    ("RoleArn",): "role_arn= sets it",
    ("Environment",): "env= sets it",
    ("HyperParameters",): "they are the arguments of the replicas and the record of the launch",
    ("Tags",): "tags= sets them",
}


def apply_overlay(request: dict[str, Any], overlay: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a request with the caller's fields merged into it; neither argument is changed.

    Mappings are merged, and everything else replaces the executor's own value. None removes a
    field.

    Raises:
        InvalidRequestError: The overlay would change something that the launch depends on.
    """
    if not overlay:
        return request
    for path, why in _OURS.items():
        if _has(overlay, path):
            raise InvalidRequestError(f"request_overlay may not set {'.'.join(path)}: {why}")
    merged = copy.deepcopy(request)
    _merge(merged, overlay)
    resources = merged["ResourceConfig"]
    if isinstance(preferences := resources.get("InstancePreferences"), list):
        del resources["InstanceType"], resources["InstanceCount"]  # the service takes these or them
        resources["InstancePreferences"] = [
            {**item, "InstanceCount": 1} if isinstance(item, Mapping) else item
            for item in preferences
        ]
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


def _merge(base: dict[str, Any], patch: Mapping[str, Any]) -> None:
    for key, value in patch.items():
        if value is None:
            base.pop(key, None)
        elif isinstance(value, Mapping) and isinstance(base.get(key), dict):
            _merge(base[key], value)
        else:
            base[key] = copy.deepcopy(value)

"""What an executor was made with, checked once."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from diloco_protocol import InvalidRequestError

from ._gpus import check_table
from ._names import check_dns_label, check_key, check_labels, check_object_name
from ._quantities import check_bytes, check_cpu

RUNNER = ("python", "-m", "diloco_protocol.runner")
FAILURE_CHOICES = ("fail_run", "continue")


@dataclass(frozen=True, slots=True)
class Settings:
    """The part of an executor's arguments that shapes its Jobs; :class:`diloco_eks.EKSExecutor` says what they mean."""

    image: str
    namespace: str = "default"
    service_account_name: str | None = None
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: Sequence[Mapping[str, Any]] = ()
    runtime_class_name: str | None = None
    command: Sequence[str] = RUNNER
    cpu_request: str = "4"
    memory_request: str = "16Gi"
    ttl_seconds_after_finished: int | None = 3600
    gpu_resource_key: str = "nvidia.com/gpu"
    gpu_types: Mapping[str, Mapping[str, tuple[str, ...]]] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    owner: str | None = None
    on_replica_failure: str = "fail_run"
    pending_timeout: float | None = 3600.0
    grace: float = 10.0
    queue: str | None = None
    ephemeral_storage: str | None = None
    shm_size: str | None = None
    efa: int = 0
    pod_overlay: Mapping[str, Any] | None = None


def check_settings(**given: Any) -> Settings:
    """Settings of checked values.

    Raises:
        InvalidRequestError: A value is not allowed; names it and says what is.
    """
    image = given.pop("image")
    if not isinstance(image, str) or not image or any(character.isspace() for character in image):
        raise InvalidRequestError(f"image must be the name of a container image, not {image!r}")
    choice = given["on_replica_failure"]
    if choice not in FAILURE_CHOICES:
        raise InvalidRequestError(
            f"on_replica_failure must be one of {', '.join(FAILURE_CHOICES)}, not {choice!r}"
        )
    storage, shared = given["ephemeral_storage"], given["shm_size"]
    for name in ("service_account_name", "runtime_class_name"):
        if given[name] is not None:
            check_object_name(name, given[name])
    return Settings(
        image=image,
        namespace=check_dns_label("namespace", given["namespace"]),
        service_account_name=given["service_account_name"],
        node_selector=_node_selector(given["node_selector"]),
        tolerations=_tolerations(given["tolerations"]),
        runtime_class_name=given["runtime_class_name"],
        command=_command(given["command"]),
        cpu_request=check_cpu("cpu_request", given["cpu_request"]),
        memory_request=check_bytes("memory_request", given["memory_request"]),
        ttl_seconds_after_finished=_seconds(
            "ttl_seconds_after_finished", given["ttl_seconds_after_finished"]
        ),
        gpu_resource_key=check_key("gpu_resource_key", given["gpu_resource_key"]),
        gpu_types=check_table(given["gpu_types"]),
        labels=check_labels("labels", _texts("labels", given["labels"])),
        annotations=_annotations(given["annotations"]),
        owner=_label_value("owner", given["owner"]),
        on_replica_failure=choice,
        pending_timeout=_duration("pending_timeout", given["pending_timeout"]),
        grace=_duration("grace", given["grace"]) or 0.0,
        queue=_label_value("queue", given["queue"]),
        ephemeral_storage=None if storage is None else check_bytes("ephemeral_storage", storage),
        shm_size=None if shared is None else check_bytes("shm_size", shared),
        efa=_whole("efa", given["efa"], 0, 64),
        pod_overlay=_overlay(given["pod_overlay"]),
    )


def _texts(name: str, values: Mapping[str, str] | None) -> dict[str, str]:
    if values is not None and not isinstance(values, Mapping):
        raise InvalidRequestError(f"{name} must be a mapping of text to text, not {values!r}")
    for key, value in (values or {}).items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise InvalidRequestError(f"{name} must map text to text; {key!r} maps to {value!r}")
    return dict(values or {})


def _node_selector(values: Mapping[str, str] | None) -> dict[str, str]:
    selector = _texts("node_selector", values)
    for key in selector:
        check_key("node_selector", key)
    return selector


def _annotations(values: Mapping[str, str] | None) -> dict[str, str]:
    annotations = _texts("annotations", values)
    for key in annotations:
        check_key("annotations", key)
        if key.startswith("diloco.dev/"):
            raise InvalidRequestError(f"annotations may not set {key}: the launch sets it")
    return annotations


def _tolerations(values: Sequence[Mapping[str, Any]] | None) -> tuple[dict[str, Any], ...]:
    fields = {"key", "operator", "value", "effect", "tolerationSeconds"}
    if isinstance(values, (str, Mapping)):
        raise InvalidRequestError(f"tolerations must be a list of mappings, not {values!r}")
    for value in values or ():
        if not isinstance(value, Mapping) or not value or value.keys() - fields:
            raise InvalidRequestError(
                f"a toleration is a mapping with some of {', '.join(sorted(fields))}, not {value!r}"
            )
    return tuple(dict(value) for value in values or ())


def _command(value: Sequence[str] | None) -> tuple[str, ...]:
    if value is None:
        return RUNNER
    if isinstance(value, str):
        raise InvalidRequestError(
            f"command must be a list of words, not text: write {shlex.split(value)!r}"
        )
    if not value or not all(isinstance(word, str) and word for word in value):
        raise InvalidRequestError(f"command must be a list of words, not {value!r}")
    return tuple(value)


def _label_value(name: str, value: str | None) -> str | None:
    if value is None:
        return None
    if not value:
        raise InvalidRequestError(f"{name} must be text or None, not {value!r}")
    return check_labels(name, {"value": value})["value"]


def _whole(name: str, value: object, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise InvalidRequestError(
            f"{name} must be a whole number from {least} to {most}, not {value!r}"
        )
    return value


def _seconds(name: str, value: object) -> int | None:
    return None if value is None else _whole(name, value, 0, 2**31 - 1)


def _duration(name: str, value: float | None) -> float | None:
    if value is None and name == "pending_timeout":
        return None
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not math.isfinite(value)
        or value < 0
    ):
        raise InvalidRequestError(f"{name} must be a number of seconds from 0, not {value!r}")
    return float(value)


def _overlay(value: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    if value is not None:
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise InvalidRequestError(f"pod_overlay must hold JSON values: {error}") from None
    return value

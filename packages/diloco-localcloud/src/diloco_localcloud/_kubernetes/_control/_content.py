"""The contents of ConfigMaps and Secrets for a pod, and a kubelet's messages for missing ones."""

from __future__ import annotations

import base64
from typing import Any

from .._objects import _resources
from .._objects._store import Store

Json = dict[str, Any]


class ConfigError(Exception):
    """A reference of a container to an object that does not exist (CreateContainerConfigError)."""


class MountError(ConfigError):
    """A volume whose object or key does not exist: the pod waits for it (ContainerCreating)."""


def content(
    store: Store, resource: _resources.Resource, pod: Json, reference: Json
) -> dict[str, bytes]:
    """Return the data of a ConfigMap or Secret.

    Raises:
        ConfigError: it is missing, and not optional.
    """
    name = reference.get("name") or reference.get("secretName", "")
    source_object = store.find(resource, pod["metadata"]["namespace"], name)
    if source_object is None:
        if reference.get("optional"):
            return {}
        raise ConfigError(f'{resource.singular} "{name}" not found')
    data = {key: value.encode() for key, value in (source_object.get("stringData") or {}).items()}
    binary = {**(source_object.get("binaryData") or {})}
    plain = source_object.get("data") or {}
    if resource is _resources.SECRETS:
        binary, plain = {**plain, **binary}, {}
    data |= {key: value.encode() for key, value in plain.items()}
    return data | {key: base64.b64decode(value) for key, value in binary.items()}


def files(store: Store, pod: Json) -> dict[str, dict[str, bytes]]:
    """Return the files of each volume by their paths in it.

    Volumes that are not made of a ConfigMap or a Secret have none.

    Raises:
        MountError: a ConfigMap, a Secret or a key of one is missing.
    """
    volumes = pod["spec"].get("volumes") or []
    return {volume["name"]: _files(store, pod, volume) for volume in volumes}


def _files(store: Store, pod: Json, volume: Json) -> dict[str, bytes]:
    made: dict[str, bytes] = {}
    kinds = {"configMap": _resources.CONFIG_MAPS, "secret": _resources.SECRETS}
    for kind, resource in kinds.items():
        if kind not in volume:
            continue
        try:
            data = content(store, resource, pod, volume[kind])
            for item in volume[kind].get("items") or [{"key": key, "path": key} for key in data]:
                if item["key"] not in data and not volume[kind].get("optional"):
                    raise ConfigError(f"references non-existent config key: {item['key']}")
                made[item["path"]] = data.get(item["key"], b"")
        except ConfigError as wrong:
            raise MountError(
                f'MountVolume.SetUp failed for volume "{volume["name"]}" : {wrong}'
            ) from None
    return made

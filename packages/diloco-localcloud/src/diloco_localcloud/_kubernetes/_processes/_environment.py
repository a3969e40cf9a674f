"""The environment of a container."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .._control._content import ConfigError, content
from .._objects._resources import CONFIG_MAPS, SECRETS, Resource
from .._objects._store import Store

Json = dict[str, Any]

_PATTERN = re.compile(r"\$(\$|\(([^)]*)\))")


def resolve(store: Store, pod: Json, container: Json, base: Mapping[str, str]) -> dict[str, str]:
    """Return all variables of a container.

    The image's come first, then ``envFrom``, then ``env`` in its order; each sees those before it.

    Raises:
        ConfigError: a ConfigMap, Secret or key is missing, or its data are not text.
    """
    env = dict(base)
    for source in container.get("envFrom") or []:
        for kind, resource in (("configMapRef", CONFIG_MAPS), ("secretRef", SECRETS)):
            if kind in source:
                data = content(store, resource, pod, source[kind])
                where, prefix = _where(resource, pod, source[kind]), source.get("prefix", "")
                env |= {prefix + key: _text(data, key, where) for key in data}
    for entry in container.get("env") or []:
        if entry.get("valueFrom"):
            value = _from(store, pod, entry["valueFrom"])
            if value is not None:
                env[entry["name"]] = value
        else:
            env[entry["name"]] = expand(entry.get("value", ""), env)
    return env


def _from(store: Store, pod: Json, source: Json) -> str | None:
    if "fieldRef" in source:
        return field(pod, source["fieldRef"]["fieldPath"])
    for kind, resource in (("configMapKeyRef", CONFIG_MAPS), ("secretKeyRef", SECRETS)):
        if kind in source:
            reference, key = source[kind], source[kind]["key"]
            data, where = content(store, resource, pod, reference), _where(resource, pod, reference)
            if key not in data and not reference.get("optional"):
                raise ConfigError(f"couldn't find key {key} in {where}")
            return _text(data, key, where) if key in data else None
    raise ConfigError(f"the stand-in does not support the environment source {', '.join(source)}")


def _where(resource: Resource, pod: Json, reference: Json) -> str:
    return f"{resource.kind} {pod['metadata']['namespace']}/{reference['name']}"


def _text(data: Mapping[str, bytes], key: str, where: str) -> str:
    try:
        return data[key].decode()
    except UnicodeDecodeError:
        raise ConfigError(f"key {key} in {where} is not UTF-8, as a variable has to be") from None


def field(pod: Json, path: str) -> str:
    """Return a field of the pod by the downward API; "" for a missing label or annotation.

    Raises:
        ConfigError: there is no such field.
    """
    meta, spec, status = pod["metadata"], pod["spec"], pod["status"]
    for name in ("labels", "annotations"):
        if path.startswith(f"metadata.{name}['") and path.endswith("']"):
            return str((meta.get(name) or {}).get(path[len(f"metadata.{name}['") : -2], ""))
    fields = {
        "metadata.name": meta["name"],
        "metadata.namespace": meta["namespace"],
        "metadata.uid": meta["uid"],
        "spec.nodeName": spec.get("nodeName", ""),
        "spec.serviceAccountName": spec.get("serviceAccountName", ""),
        "status.hostIP": status.get("hostIP", ""),
        "status.podIP": status.get("podIP", "127.0.0.1"),
        "status.podIPs": status.get("podIP", "127.0.0.1"),
    }
    if path not in fields:
        raise ConfigError(f"failed to prepare the environment: unsupported fieldPath: {path}")
    return str(fields[path])


def expand(text: str, known: Mapping[str, str]) -> str:
    """Replace ``$(NAME)`` by its value, or leave it if there is none; ``$$`` becomes ``$``."""

    def value(match: re.Match[str]) -> str:
        if match[1] == "$":
            return "$"
        return known.get(match[2], match[0])

    return _PATTERN.sub(value, text)

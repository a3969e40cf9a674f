"""The defaults that the API server adds to a pod's spec, and its refusals."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from ..._objects._quantities import quantity
from ._names import LABEL_WORDS, Cause, forbidden, invalid, is_label, not_supported, required

Json = dict[str, Any]


def with_defaults(spec: Json) -> Json:
    """Return a pod spec with the API server's defaults."""
    new: Json = {
        "dnsPolicy": "ClusterFirst",
        "restartPolicy": "Always",
        "schedulerName": "default-scheduler",
        "securityContext": {},
        "terminationGracePeriodSeconds": 30,
        **copy.deepcopy(spec),
    }
    if new.get("serviceAccountName"):
        new.setdefault("serviceAccount", new["serviceAccountName"])
    for kind in {"initContainers", "containers"} & new.keys():
        new[kind] = [_container_with_defaults(container) for container in new[kind]]
    return new


def _container_with_defaults(container: Json) -> Json:
    last = container.get("image", "").rpartition("/")[2]
    latest = "@" not in last and (":" not in last or last.endswith(":latest"))
    new = {
        "resources": {},
        "terminationMessagePath": "/dev/termination-log",
        "terminationMessagePolicy": "File",
        "imagePullPolicy": "Always" if latest else "IfNotPresent",
        **container,
    }
    for entry in new.get("env") or []:
        if "fieldRef" in (entry.get("valueFrom") or {}):
            entry["valueFrom"]["fieldRef"].setdefault("apiVersion", "v1")
    limits, requests = (new["resources"].get(kind) or {} for kind in ("limits", "requests"))
    if limits:
        new["resources"] = {**new["resources"], "requests": {**limits, **requests}}
    return new


def causes(spec: Json, field: str) -> Iterator[Cause]:
    """Yield what is wrong with a pod spec."""
    if not spec.get("containers"):
        yield required(f"{field}.containers")
    if spec["restartPolicy"] != "Never":
        words = "the stand-in starts no container again, and serves Never alone"
        yield forbidden(f"{field}.restartPolicy", words)
    for place, volume in enumerate(spec.get("volumes") or []):
        yield from _volume(volume, f"{field}.volumes[{place}]")
    volumes = {volume.get("name") for volume in spec.get("volumes") or []}
    names: set[str] = set()
    for kind in ("initContainers", "containers"):
        for place, container in enumerate(spec.get(kind) or []):
            where, name = f"{field}.{kind}[{place}]", container.get("name", "")
            yield from _container(container, where, volumes)
            if name in names:
                yield f"{where}.name", "FieldValueDuplicate", f'Duplicate value: "{name}"'
            names.add(name)


def _volume(volume: Json, where: str) -> Iterator[Cause]:
    if not volume.get("name"):
        yield required(f"{where}.name")
    if len(volume.keys() - {"name"}) > 1:
        yield forbidden(where, "may not specify more than 1 volume type")
    for kind, name in (("configMap", "name"), ("secret", "secretName")):
        source = volume.get(kind)
        if source is not None and not source.get(name):
            yield required(f"{where}.{kind}.{name}")
        for place, item in enumerate((source or {}).get("items") or []):
            field = f"{where}.{kind}.items[{place}]"
            yield from (
                required(f"{field}.{part}") for part in ("key", "path") if not item.get(part)
            )
            yield from _inside(item.get("path") or "", f"{field}.path")


def _inside(path: str, field: str) -> Iterator[Cause]:
    """Yield what is wrong with a path that must stay inside its volume."""
    if path.startswith("/"):
        yield invalid(field, path, "must be a relative path")
    elif ".." in path.split("/"):
        yield invalid(field, path, "must not contain '..'")


def _container(container: Json, where: str, volumes: set[str]) -> Iterator[Cause]:
    name = container.get("name", "")
    if not name:
        yield required(f"{where}.name")
    elif not is_label(name):
        yield invalid(f"{where}.name", name, LABEL_WORDS)
    if not container.get("image"):
        yield required(f"{where}.image")
    for place, entry in enumerate(container.get("env") or []):
        field, words = f"{where}.env[{place}]", "may not be specified when `value` is not empty"
        if not entry.get("name"):
            yield required(f"{field}.name")
        elif "=" in entry["name"]:
            rule = (
                "a valid environment variable name must consist only of printable ASCII "
                "characters other than '='"
            )
            yield invalid(f"{field}.name", entry["name"], rule)
        if entry.get("value") and entry.get("valueFrom"):
            yield invalid(f"{field}.valueFrom", "", words)
    for place, mount in enumerate(container.get("volumeMounts") or []):
        field, named = f"{where}.volumeMounts[{place}]", mount.get("name")
        if named not in volumes:
            yield f"{field}.name", "FieldValueNotFound", f'Not found: "{named}"'
        yield from _inside(mount.get("subPath") or "", f"{field}.subPath")
    policy = container.get("terminationMessagePolicy", "File")
    if policy not in ("File", "FallbackToLogsOnError"):
        field = f"{where}.terminationMessagePolicy"
        yield not_supported(field, policy, ["FallbackToLogsOnError", "File"])
    yield from _resources(container.get("resources") or {}, f"{where}.resources")


def _resources(resources: Json, where: str) -> Iterator[Cause]:
    limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
    for name, value in requests.items():
        extended, limit = "/" in name, limits.get(name)
        if extended and limit is None:
            words = "Limit must be set for non overcommitable resources"
            yield required(f"{where}.limits", words)
        elif extended and quantity(value) != quantity(limit):
            yield invalid(f"{where}.requests", value, f"must be equal to {name} limit of {limit}")
        elif limit is not None and quantity(value) > quantity(limit):
            words = f"must be less than or equal to {name} limit of {limit}"
            yield invalid(f"{where}.requests", value, words)
    for name, value in limits.items():
        if "/" in name and quantity(value) != int(quantity(value)):
            yield invalid(f"{where}.limits[{name}]", str(value), "must be an integer")

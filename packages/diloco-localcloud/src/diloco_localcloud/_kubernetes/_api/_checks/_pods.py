"""The defaults that the API server adds to a pod's spec, and its refusals."""

from __future__ import annotations

import copy
from typing import Any

from ..._objects._quantities import quantity
from ._names import LABEL_WORDS, Cause, invalid, is_label, not_supported, required

Json = dict[str, Any]

# In the order in which the server looks at them.
_SOURCES = (
    "emptyDir", "hostPath", "gitRepo", "secret", "nfs", "iscsi", "persistentVolumeClaim", "cephfs",
    "downwardAPI", "fc", "configMap", "projected", "csi", "ephemeral", "image",
)  # fmt: skip


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
    for kind in ("initContainers", "containers"):
        if kind in new:
            new[kind] = [_container_with_defaults(container) for container in new[kind]]
    return new


def _container_with_defaults(container: Json) -> Json:
    image = container.get("image", "")
    last = image.rpartition("/")[2]
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
    limits = new["resources"].get("limits")
    if limits:
        new["resources"] = {
            **new["resources"],
            "requests": {**limits, **new["resources"].get("requests", {})},
        }
    return new


def causes(spec: Json, field: str) -> list[Cause]:
    """Return what is wrong with a pod spec."""
    problems: list[Cause] = []
    if not spec.get("containers"):
        problems.append(required(f"{field}.containers"))
    if spec["restartPolicy"] != "Never":
        words = "Forbidden: the stand-in starts no container again, and serves Never alone"
        problems.append((f"{field}.restartPolicy", "FieldValueForbidden", words))
    for place, volume in enumerate(spec.get("volumes") or []):
        problems += _volume(volume, f"{field}.volumes[{place}]")
    volumes = {volume.get("name") for volume in spec.get("volumes") or []}
    names: set[str] = set()
    for kind in ("initContainers", "containers"):
        for place, container in enumerate(spec.get(kind) or []):
            where = f"{field}.{kind}[{place}]"
            problems += _container(container, where, volumes)
            if container.get("name") in names:
                problems.append(
                    (
                        f"{where}.name",
                        "FieldValueDuplicate",
                        f'Duplicate value: "{container["name"]}"',
                    )
                )
            names.add(container.get("name", ""))
    return problems


def _volume(volume: Json, where: str) -> list[Cause]:
    problems = [] if volume.get("name") else [required(f"{where}.name")]
    for kind in [kind for kind in _SOURCES if kind in volume][1:]:
        words = "Forbidden: may not specify more than 1 volume type"
        problems.append((f"{where}.{kind}", "FieldValueForbidden", words))
    for kind, name in (("configMap", "name"), ("secret", "secretName")):
        source = volume.get(kind)
        if source is None:
            continue
        if not source.get(name):
            problems.append(required(f"{where}.{kind}.{name}"))
        problems += [
            required(f"{where}.{kind}.items[{place}].{part}")
            for place, item in enumerate(source.get("items") or [])
            for part in ("key", "path")
            if not item.get(part)
        ]
        for place, item in enumerate(source.get("items") or []):
            problems += _inside(item.get("path") or "", f"{where}.{kind}.items[{place}].path")
    return problems


def _inside(path: str, field: str) -> list[Cause]:
    """Return what is wrong with a path that must stay inside its volume."""
    if path.startswith("/"):
        return [invalid(field, path, "must be a relative path")]
    if ".." in path.split("/"):
        return [invalid(field, path, "must not contain '..'")]
    return []


def _container(container: Json, where: str, volumes: set[str]) -> list[Cause]:
    problems: list[Cause] = []
    name = container.get("name", "")
    if not name:
        problems.append(required(f"{where}.name"))
    elif not is_label(name):
        problems.append(invalid(f"{where}.name", name, LABEL_WORDS))
    if not container.get("image"):
        problems.append(required(f"{where}.image"))
    for place, entry in enumerate(container.get("env") or []):
        if not entry.get("name"):
            problems.append(required(f"{where}.env[{place}].name"))
        elif "=" in entry["name"]:
            words = (
                "a valid environment variable name must consist only of printable ASCII "
                "characters other than '='"
            )
            problems.append(invalid(f"{where}.env[{place}].name", entry["name"], words))
        if entry.get("value") and entry.get("valueFrom"):
            words = "may not be specified when `value` is not empty"
            problems.append(invalid(f"{where}.env[{place}].valueFrom", "", words))
    for place, mount in enumerate(container.get("volumeMounts") or []):
        if mount.get("name") not in volumes:
            problems.append(
                (
                    f"{where}.volumeMounts[{place}].name",
                    "FieldValueNotFound",
                    f'Not found: "{mount.get("name")}"',
                )
            )
        problems += _inside(mount.get("subPath") or "", f"{where}.volumeMounts[{place}].subPath")
    policy = container.get("terminationMessagePolicy", "File")
    if policy not in ("File", "FallbackToLogsOnError"):
        problems.append(
            not_supported(
                f"{where}.terminationMessagePolicy", policy, ["FallbackToLogsOnError", "File"]
            )
        )
    return problems + _resources(container.get("resources") or {}, f"{where}.resources")


def _resources(resources: Json, where: str) -> list[Cause]:
    problems: list[Cause] = []
    limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
    for name, value in requests.items():
        extended = "/" in name
        if extended and name not in limits:
            problems.append(
                (
                    f"{where}.limits",
                    "FieldValueRequired",
                    "Required value: Limit must be set for non overcommitable resources",
                )
            )
        elif name in limits and extended and quantity(value) != quantity(limits[name]):
            problems.append(
                invalid(
                    f"{where}.requests", value, f"must be equal to {name} limit of {limits[name]}"
                )
            )
        elif name in limits and quantity(value) > quantity(limits[name]):
            problems.append(
                invalid(
                    f"{where}.requests",
                    value,
                    f"must be less than or equal to {name} limit of {limits[name]}",
                )
            )
    for name, value in limits.items():
        if "/" in name and quantity(value) != int(quantity(value)):
            problems.append(invalid(f"{where}.limits[{name}]", str(value), "must be an integer"))
    return problems

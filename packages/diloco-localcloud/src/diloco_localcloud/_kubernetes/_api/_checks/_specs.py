"""The defaults that the API server adds to the specs of Jobs and pods, and its refusals."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from ..._objects import _refusals
from ..._objects._quantities import quantity
from ..._objects._resources import JOBS
from . import _names
from ._names import LABEL_WORDS, Cause, forbidden, invalid, is_label, not_supported, required

Json = dict[str, Any]

NO_LIMIT = 2147483647
# A cluster lets a part of the template change while the Job is suspended and has never started.
_IMMUTABLE = "completionMode selector template podFailurePolicy backoffLimitPerIndex"
_NUMBERS = (
    *("parallelism", "completions", "backoffLimit", "backoffLimitPerIndex", "maxFailedIndexes"),
    *("activeDeadlineSeconds", "ttlSecondsAfterFinished"),
)
_UNSERVED = ("managedBy", "manualSelector", "successPolicy")


def new_job(job: Json) -> Json:
    """Return a new Job with defaults, selector and labels; ``job`` has its uid already.

    Raises:
        ApiError: 422.
    """
    job = {**job, "spec": _with_defaults(job.get("spec") or {}), "status": {}}
    problems = [*_causes(job)]
    generated = _generated_labels(job)
    labels = dict((job["spec"]["template"].get("metadata") or {}).get("labels") or {})
    for key, value in generated.items():
        if labels.get(key, value) != value:
            problems.append(
                invalid(f"spec.template.metadata.labels[{key}]", labels[key], f"must be '{value}'")
            )
    if problems:
        raise _refusals.invalid(JOBS, job["metadata"].get("name", ""), problems)
    meta = {**(job["spec"]["template"].get("metadata") or {}), "labels": {**labels, **generated}}
    job["spec"]["template"] = {**job["spec"]["template"], "metadata": meta}
    job["spec"]["selector"] = {
        "matchLabels": {"batch.kubernetes.io/controller-uid": job["metadata"]["uid"]}
    }
    job["metadata"]["labels"] = {**meta["labels"], **(job["metadata"].get("labels") or {})}
    return job


def changed_job(old: Json, job: Json) -> Json:
    """Return a Job whose spec an update changes.

    Raises:
        ApiError: 422.
    """
    job = {**job, "spec": _with_defaults(job.get("spec") or {})}
    before, after = old["spec"], job["spec"]
    problems = [*_causes(job)]
    problems += [
        forbidden(f"spec.{field}", "field is immutable: the stand-in does not change it")
        for field in _IMMUTABLE.split()
        if before.get(field) != after.get(field)
    ]
    if before["completions"] != after.get("completions"):
        apart = [spec.get("completions") != spec["parallelism"] for spec in (before, after)]
        if before["completionMode"] != "Indexed" or any(apart):
            words = "of indexed Jobs it can be modified in tandem with spec.parallelism alone"
            problems.append(invalid("spec.completions", after.get("completions"), words))
    if problems:
        raise _refusals.invalid(JOBS, job["metadata"]["name"], problems)
    return job


def _with_defaults(spec: Json) -> Json:
    spec = {key: value for key, value in copy.deepcopy(spec).items() if value is not None}
    if "completions" not in spec and "parallelism" not in spec:
        spec["completions"] = spec["parallelism"] = 1
    spec.setdefault("parallelism", 1)
    spec.setdefault("completionMode", "NonIndexed")
    spec.setdefault("backoffLimit", NO_LIMIT if "backoffLimitPerIndex" in spec else 6)
    spec.setdefault("suspend", False)
    spec.setdefault("manualSelector", False)
    spec.setdefault(
        "podReplacementPolicy", "Failed" if "podFailurePolicy" in spec else "TerminatingOrFailed"
    )
    for rule in (spec.get("podFailurePolicy") or {}).get("rules") or []:
        for pattern in rule.get("onPodConditions") or []:
            pattern.setdefault("status", "True")
    template = spec.setdefault("template", {})
    template["spec"] = pod_with_defaults(template.get("spec") or {})
    return spec


def _generated_labels(job: Json) -> dict[str, str]:
    name, uid = job["metadata"].get("name", ""), job["metadata"]["uid"]
    return {
        "batch.kubernetes.io/controller-uid": uid,
        "batch.kubernetes.io/job-name": name,
        "controller-uid": uid,
        "job-name": name,
    }


def _causes(job: Json) -> Iterator[Cause]:
    spec, name = job["spec"], job["metadata"].get("name", "")
    for field in _NUMBERS:
        value = spec.get(field, 0)
        if value < 0:
            yield invalid(f"spec.{field}", value, "must be greater than or equal to 0")
    for field in _UNSERVED:
        if spec.get(field):
            yield forbidden(f"spec.{field}", "the stand-in does not serve it")
    yield from _indexed(spec, name)
    yield from _policies(spec)
    meta = spec["template"].get("metadata") or {}
    yield from _names.labels(meta.get("labels") or {}, "spec.template.metadata.labels")
    yield from _names.keys(meta.get("annotations") or {}, "spec.template.metadata.annotations")
    yield from pod_causes(spec["template"]["spec"], "spec.template.spec")


def _indexed(spec: Json, name: str) -> Iterator[Cause]:
    mode, limit = spec["completionMode"], spec.get("backoffLimitPerIndex")
    completions, most = spec.get("completions"), spec.get("maxFailedIndexes")
    if mode not in ("NonIndexed", "Indexed"):
        yield not_supported("spec.completionMode", mode, ["NonIndexed", "Indexed"])
    if mode != "Indexed" and limit is not None:
        yield invalid("spec.backoffLimitPerIndex", limit, "requires indexed completion mode")
    if completions is None:
        yield required("spec.completions", "when completion mode is Indexed, or for the stand-in")
    elif mode == "Indexed" and completions and not _names.is_label(f"{name}-{completions - 1}"):
        words = f"will not able to create pod with invalid DNS label: {name}-{completions - 1}"
        yield invalid("metadata.name", name, words)
    if mode == "Indexed" and spec["parallelism"] > 100_000:
        words = "must be less than or equal to 100000 when completion mode is Indexed"
        yield invalid("spec.parallelism", spec["parallelism"], words)
    if most is not None and limit is None:
        yield required("spec.backoffLimitPerIndex", "when maxFailedIndexes is specified")
    elif most is not None and most > (completions or 0):
        yield invalid("spec.maxFailedIndexes", most, "must be less than or equal to completions")


def _policies(spec: Json) -> Iterator[Cause]:
    replacement, policy = spec["podReplacementPolicy"], spec.get("podFailurePolicy")
    allowed = ["Failed", "TerminatingOrFailed"] if policy is None else ["Failed"]
    if replacement not in allowed:
        yield not_supported("spec.podReplacementPolicy", replacement, allowed)
    names = {container.get("name") for container in spec["template"]["spec"].get("containers", [])}
    actions = {"Count", "FailJob", "Ignore"}
    if spec.get("backoffLimitPerIndex") is not None:
        actions.add("FailIndex")
    for place, rule in enumerate((policy or {}).get("rules") or []):
        codes = rule.get("onExitCodes") or {}
        if (
            rule.get("action") not in actions
            or bool(codes) == bool(rule.get("onPodConditions"))
            or codes.get("containerName") not in (None, *names)
        ):
            words = (
                f"needs an action of {', '.join(sorted(actions))} (FailIndex with "
                "backoffLimitPerIndex alone), and either onExitCodes, of a container of the "
                "template if one is named, or onPodConditions"
            )
            yield invalid(f"spec.podFailurePolicy.rules[{place}]", rule, words)


def pod_with_defaults(spec: Json) -> Json:
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


def pod_causes(spec: Json, field: str) -> Iterator[Cause]:
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

"""The defaults that the API server adds to a Job, and its refusals."""

from __future__ import annotations

import copy
from typing import Any

from ..._objects import _refusals
from . import _names, _pods
from ._names import Cause, invalid, not_supported, required

Json = dict[str, Any]

NO_LIMIT = 2147483647
_IMMUTABLE = (
    "selector",
    "completionMode",
    "podFailurePolicy",
    "backoffLimitPerIndex",
)
_UNSERVED = ("managedBy", "manualSelector", "successPolicy")


def new(job: Json) -> Json:
    """Return a new Job with defaults, selector and labels; ``job`` has its uid already.

    Raises:
        ApiError: 422.
    """
    job = {**job, "spec": _with_defaults(job.get("spec") or {}), "status": {}}
    problems = _causes(job)
    generated = _generated_labels(job)
    labels = dict((job["spec"]["template"].get("metadata") or {}).get("labels") or {})
    for key, value in generated.items():
        if labels.get(key, value) != value:
            problems.append(
                invalid(f"spec.template.metadata.labels[{key}]", labels[key], f"must be '{value}'")
            )
    if problems:
        raise _refusals.invalid("Job", "batch", job["metadata"].get("name", ""), problems)
    meta = {**(job["spec"]["template"].get("metadata") or {}), "labels": {**labels, **generated}}
    job["spec"]["template"] = {**job["spec"]["template"], "metadata": meta}
    job["spec"]["selector"] = {
        "matchLabels": {"batch.kubernetes.io/controller-uid": job["metadata"]["uid"]}
    }
    job["metadata"]["labels"] = {**meta["labels"], **(job["metadata"].get("labels") or {})}
    return job


def changed(old: Json, job: Json) -> Json:
    """Return a Job whose spec an update changes.

    Raises:
        ApiError: 422.
    """
    job = {**job, "spec": _with_defaults(job.get("spec") or {})}
    before, after = old["spec"], job["spec"]
    problems = _causes(job)
    if before.get("completions") != after.get("completions"):
        tandem = before.get("completionMode") == "Indexed" and before.get(
            "completions"
        ) == before.get("parallelism")
        if not tandem:
            problems.append(
                invalid("spec.completions", after.get("completions"), "field is immutable")
            )
        elif after.get("completions") != after.get("parallelism"):
            words = "can only be modified in tandem with spec.parallelism"
            problems.append(invalid("spec.completions", after.get("completions"), words))
    for field in _IMMUTABLE:
        if before.get(field) != after.get(field):
            problems.append(invalid(f"spec.{field}", after.get(field), "field is immutable"))
    if before["template"] != after["template"]:
        # A cluster lets a part of it change while the Job is suspended and has never started.
        words = "Forbidden: the stand-in does not change it"
        problems.append(("spec.template", "FieldValueForbidden", words))
    if problems:
        raise _refusals.invalid("Job", "batch", job["metadata"]["name"], problems)
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
    template["spec"] = _pods.with_defaults(template.get("spec") or {})
    return spec


def _generated_labels(job: Json) -> dict[str, str]:
    name, uid = job["metadata"].get("name", ""), job["metadata"]["uid"]
    return {
        "batch.kubernetes.io/controller-uid": uid,
        "batch.kubernetes.io/job-name": name,
        "controller-uid": uid,
        "job-name": name,
    }


def _causes(job: Json) -> list[Cause]:
    spec, name = job["spec"], job["metadata"].get("name", "")
    problems = _names.metadata(job["metadata"])
    for field in (
        "parallelism",
        "completions",
        "backoffLimit",
        "backoffLimitPerIndex",
        "maxFailedIndexes",
        "activeDeadlineSeconds",
        "ttlSecondsAfterFinished",
    ):
        value = spec.get(field, 0)
        if value < 0:
            problems.append(invalid(f"spec.{field}", value, "must be greater than or equal to 0"))
    problems += [
        (f"spec.{field}", "FieldValueForbidden", "Forbidden: the stand-in does not serve it")
        for field in _UNSERVED
        if spec.get(field)
    ]
    problems += _indexed(spec, name)
    problems += _policies(spec)
    meta = spec["template"].get("metadata") or {}
    problems += _names.labels(meta.get("labels") or {}, "spec.template.metadata.labels")
    problems += _names.keys(meta.get("annotations") or {}, "spec.template.metadata.annotations")
    problems += _pods.causes(spec["template"]["spec"], "spec.template.spec")
    return problems


def _indexed(spec: Json, name: str) -> list[Cause]:
    problems: list[Cause] = []
    mode = spec["completionMode"]
    if mode not in ("Indexed", "NonIndexed"):
        return [not_supported("spec.completionMode", mode, ["NonIndexed", "Indexed"])]
    limit = spec.get("backoffLimitPerIndex")
    if mode == "NonIndexed":
        if limit is not None:
            problems.append(
                invalid("spec.backoffLimitPerIndex", limit, "requires indexed completion mode")
            )
        return problems
    if spec.get("completions") is None:
        problems.append(required("spec.completions", "when completion mode is Indexed"))
    elif (
        name
        and spec["completions"] > 0
        and not _names.is_label(f"{name}-{spec['completions'] - 1}")
    ):
        host = f"{name}-{spec['completions'] - 1}"
        problems.append(
            invalid(
                "metadata.name", name, f"will not able to create pod with invalid DNS label: {host}"
            )
        )
    if spec["parallelism"] > 100_000:
        words = "must be less than or equal to 100000 when completion mode is Indexed"
        problems.append(invalid("spec.parallelism", spec["parallelism"], words))
    most = spec.get("maxFailedIndexes")
    if most is not None and limit is None:
        problems.append(required("spec.backoffLimitPerIndex", "when maxFailedIndexes is specified"))
    elif most is not None and most > spec.get("completions", 0):
        words = "must be less than or equal to completions"
        problems.append(invalid("spec.maxFailedIndexes", most, words))
    return problems


def _policies(spec: Json) -> list[Cause]:
    problems: list[Cause] = []
    replacement = spec["podReplacementPolicy"]
    policy = spec.get("podFailurePolicy")
    if replacement not in ("Failed", "TerminatingOrFailed"):
        problems.append(
            not_supported(
                "spec.podReplacementPolicy", replacement, ["Failed", "TerminatingOrFailed"]
            )
        )
    if policy is None:
        return problems
    if replacement == "TerminatingOrFailed":
        problems.append(not_supported("spec.podReplacementPolicy", replacement, ["Failed"]))
    names = {container.get("name") for container in spec["template"]["spec"].get("containers", [])}
    for place, rule in enumerate(policy.get("rules") or []):
        where = f"spec.podFailurePolicy.rules[{place}]"
        action = rule.get("action")
        if action not in ("Count", "FailIndex", "FailJob", "Ignore"):
            problems.append(
                not_supported(
                    f"{where}.action", action or "", ["Count", "FailIndex", "FailJob", "Ignore"]
                )
            )
        elif action == "FailIndex" and spec.get("backoffLimitPerIndex") is None:
            problems.append(
                invalid(f"{where}.action", action, "requires the backoffLimitPerIndex to be set")
            )
        codes = rule.get("onExitCodes")
        if bool(codes) == bool(rule.get("onPodConditions")):
            words = "specifying one of OnExitCodes and OnPodConditions is required"
            problems.append((where, "FieldValueInvalid", f"Invalid value: {words}"))
        elif codes and codes.get("containerName") not in (None, *names):
            words = "must be one of the container or initContainer names in the pod template"
            problems.append(
                invalid(f"{where}.onExitCodes.containerName", codes["containerName"], words)
            )
    return problems

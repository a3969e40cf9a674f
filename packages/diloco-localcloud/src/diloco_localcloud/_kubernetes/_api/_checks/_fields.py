"""The fields of a Job and of a pod; like the real server, it does not decode any others."""

from __future__ import annotations

from typing import Any

from ..._objects import _refusals

Json = dict[str, Any]

_CONTAINER = """
args command env envFrom image imagePullPolicy lifecycle livenessProbe name ports readinessProbe
resizePolicy resources restartPolicy restartPolicyRules securityContext startupProbe stdin stdinOnce
terminationMessagePath terminationMessagePolicy tty volumeDevices volumeMounts workingDir
"""
_POD = """
activeDeadlineSeconds affinity automountServiceAccountToken containers dnsConfig dnsPolicy
enableServiceLinks ephemeralContainers hostAliases hostIPC hostNetwork hostPID hostUsers hostname
hostnameOverride imagePullSecrets initContainers nodeName nodeSelector os overhead preemptionPolicy
priority priorityClassName readinessGates resourceClaims resources restartPolicy runtimeClassName
schedulerName schedulingGates schedulingGroup securityContext serviceAccount serviceAccountName
setHostnameAsFQDN shareProcessNamespace subdomain terminationGracePeriodSeconds tolerations
topologySpreadConstraints volumes workloadRef
"""
_JOB = """
activeDeadlineSeconds backoffLimit backoffLimitPerIndex completionMode completions managedBy
manualSelector maxFailedIndexes parallelism podFailurePolicy podReplacementPolicy scheduling
selector successPolicy suspend template ttlSecondsAfterFinished
"""
_TOP = "apiVersion kind metadata spec status"
CONTAINER, POD, JOB, TOP = (frozenset(text.split()) for text in (_CONTAINER, _POD, _JOB, _TOP))


def known(kind: str, obj: Json, validation: str) -> tuple[Json, list[str]]:
    """Return a Job or Pod without its unknown fields.

    Args:
        kind: ``Job`` or ``Pod``.
        obj: the object as it was sent.
        validation: ``Strict`` refuses unknown fields, ``Warn`` drops them with a warning,
            ``Ignore`` drops them silently.

    Returns:
        The object, and the warnings.

    Raises:
        ApiError: 400 with ``Strict``, naming the fields.
    """
    unknown: list[str] = []
    obj = _keep(obj, TOP, "", unknown)
    if isinstance(obj.get("spec"), dict):
        spec = obj["spec"]
        if kind == "Job":
            spec = _keep(spec, JOB, "spec.", unknown)
            template = spec.get("template")
            if isinstance(template, dict):
                template = _keep(
                    template, frozenset(("metadata", "spec")), "spec.template.", unknown
                )
                if isinstance(template.get("spec"), dict):
                    template = {
                        **template,
                        "spec": _pod(template["spec"], "spec.template.spec.", unknown),
                    }
                spec = {**spec, "template": template}
        else:
            spec = _pod(spec, "spec.", unknown)
        obj = {**obj, "spec": spec}
    words = [f'unknown field "{field}"' for field in unknown]
    if words and validation == "Strict":
        raise _refusals.bad_request(
            f'{kind} in version "v1" cannot be handled as a {kind}: '
            f"strict decoding error: {', '.join(words)}"
        )
    return obj, words if validation == "Warn" else []


def _pod(spec: Json, where: str, unknown: list[str]) -> Json:
    spec = _keep(spec, POD, where, unknown)
    for kind in ("initContainers", "containers"):
        if isinstance(spec.get(kind), list):
            listed = enumerate(spec[kind])
            kept = [
                _keep(container, CONTAINER, f"{where}{kind}[{place}].", unknown)
                for place, container in listed
            ]
            spec = {**spec, kind: kept}
    return spec


def _keep(obj: Any, fields: frozenset[str], where: str, unknown: list[str]) -> Any:
    if not isinstance(obj, dict):
        raise _refusals.bad_request(
            f"json: cannot unmarshal into Go value: {where.rstrip('.') or 'the object'} is no "
            "object"
        )
    unknown += [where + field for field in obj if field not in fields]
    return {field: value for field, value in obj.items() if field in fields}

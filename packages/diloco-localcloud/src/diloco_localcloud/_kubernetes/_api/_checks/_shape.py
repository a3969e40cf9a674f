"""The fields of objects, and the types of those that the stand-in reads.

Values that a real server could not decode are refused before they are used. A field that a Job, a
pod or a container does not have is refused, too, which a real server does if a client asks for it
(``fieldValidation=Strict``, as kubectl does).
"""

from __future__ import annotations

import re
from typing import Any

from ..._objects import _refusals
from ..._objects._quantities import quantity

Json = dict[str, Any]


# A shape is "string", "int", "bool", "number", "quantity", "base64" or "any"; [shape] for a list;
# ("map", shape); or a dict of fields.
def _fields(rest: str = "", *, strings: str = "", ints: str = "", **typed: Any) -> Json:
    """Return the shape of an object, with the names of its fields; ``rest`` are not looked at."""
    kinds = {"any": rest, "string": strings, "int": ints}
    return {name: kind for kind, names in kinds.items() for name in names.split()} | typed


_REFERENCE = _fields(strings="name key secretName", optional="bool")
_VOLUME_SOURCE = {**_REFERENCE, "items": [_fields(strings="key path")]}
_META = _fields(
    strings="name generateName namespace uid resourceVersion",
    labels=("map", "string"),
    annotations=("map", "string"),
    finalizers=["string"],
    ownerReferences=[_fields(strings="kind name uid apiVersion")],
)
_ENV = _fields(
    strings="name value",
    valueFrom={
        "fieldRef": {"fieldPath": "string"},
        "configMapKeyRef": _REFERENCE,
        "secretKeyRef": _REFERENCE,
    },
)
_SECURITY = _fields(ints="runAsUser", runAsNonRoot="bool", seccompProfile={"type": "string"})
_REQUIREMENT = _fields(strings="key operator", values=["string"])
_NODE_TERM = {"matchExpressions": [_REQUIREMENT]}
_CONTAINER = _fields(
    "imagePullPolicy lifecycle livenessProbe ports readinessProbe resizePolicy restartPolicy "
    "restartPolicyRules startupProbe stdin stdinOnce tty volumeDevices",
    strings="name image workingDir terminationMessagePath terminationMessagePolicy",
    command=["string"],
    args=["string"],
    env=[_ENV],
    envFrom=[{"prefix": "string", "configMapRef": _REFERENCE, "secretRef": _REFERENCE}],
    resources={"limits": ("map", "quantity"), "requests": ("map", "quantity")},
    volumeMounts=[_fields(strings="name mountPath subPath")],
    securityContext={
        **_SECURITY,
        "allowPrivilegeEscalation": "bool",
        "capabilities": {"add": ["string"], "drop": ["string"]},
        "privileged": "bool",
    },
)
_POD_SPEC = _fields(
    "activeDeadlineSeconds automountServiceAccountToken dnsConfig dnsPolicy enableServiceLinks "
    "ephemeralContainers hostAliases hostIPC hostNetwork hostPID hostUsers hostnameOverride "
    "imagePullSecrets os overhead preemptionPolicy readinessGates resourceClaims resources "
    "schedulerName schedulingGates schedulingGroup serviceAccount setHostnameAsFQDN "
    "shareProcessNamespace subdomain topologySpreadConstraints workloadRef",
    strings="hostname nodeName priorityClassName restartPolicy runtimeClassName serviceAccountName",
    ints="priority terminationGracePeriodSeconds",
    containers=[_CONTAINER],
    initContainers=[_CONTAINER],
    volumes=[
        {
            "name": "string",
            "configMap": _VOLUME_SOURCE,
            "secret": _VOLUME_SOURCE,
            "hostPath": {"path": "string"},
            "persistentVolumeClaim": {"claimName": "string"},
        }
    ],
    nodeSelector=("map", "string"),
    securityContext=_SECURITY,
    affinity={
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [_NODE_TERM]}
        }
    },
    tolerations=[_fields(strings="key operator value effect", ints="tolerationSeconds")],
)
_TEMPLATE = {"metadata": _META, "spec": _POD_SPEC}
_RULE = {
    "action": "string",
    "onExitCodes": {"containerName": "string", "operator": "string", "values": ["int"]},
    "onPodConditions": [_fields(strings="type status")],
}
_JOB_SPEC = _fields(
    "managedBy scheduling selector successPolicy",
    strings="completionMode podReplacementPolicy",
    ints="activeDeadlineSeconds backoffLimit backoffLimitPerIndex completions maxFailedIndexes "
    "parallelism ttlSecondsAfterFinished",
    suspend="bool",
    manualSelector="bool",
    template=_TEMPLATE,
    podFailurePolicy={"rules": [_RULE]},
)
_STATUS = {"conditions": [_fields(strings="type status")]}
_JOB = _fields("apiVersion kind", metadata=_META, spec=_JOB_SPEC, status=_STATUS)
_POD = _fields("apiVersion kind", metadata=_META, spec=_POD_SPEC, status=_STATUS)
# Shapes that name every field, so that others are refused.
_COMPLETE = (_JOB, _JOB_SPEC, _TEMPLATE, _POD, _POD_SPEC, _CONTAINER, _NODE_TERM)
_SCOPE = _fields(strings="scopeName operator", values=["string"])
_KINDS: dict[str, Any] = {
    "Job": _JOB,
    "Pod": _POD,
    "ConfigMap": {"metadata": _META, "data": ("map", "string"), "binaryData": ("map", "base64")},
    "Secret": {"metadata": _META, "data": ("map", "base64"), "stringData": ("map", "string")},
    "DeleteOptions": _fields(
        strings="propagationPolicy",
        ints="gracePeriodSeconds",
        preconditions=_fields(strings="uid resourceVersion"),
        orphanDependents="bool",
        dryRun=["string"],
    ),
    "LimitRange": {
        "metadata": _META,
        "spec": {"limits": [{"type": "string", "max": ("map", "quantity")}]},
    },
    "Workload": {"metadata": _META, "spec": {"active": "bool"}},
    "ResourceQuota": {
        "metadata": _META,
        "spec": {
            "hard": ("map", "quantity"),
            "scopes": ["string"],
            "scopeSelector": {"matchExpressions": [_SCOPE]},
        },
    },
}
_BASE64 = re.compile(r"(?:[a-zA-Z0-9+/]{4})*(?:[a-zA-Z0-9+/]{2}==|[a-zA-Z0-9+/]{3}=)?")
_PYTHON: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "int": (int,),
    "bool": (bool,),
    "base64": (str,),
    "quantity": (str, int, float),
}
_NAMES: dict[type, str] = {
    bool: "bool",
    int: "number",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}


def decode(kind: str, obj: Json) -> Json:
    """Return the object without its nulls; every field has the type that it must have.

    Raises:
        ApiError: 400, in the words of the real server's decoder.
    """
    return dict(_decode(obj, _KINDS.get(kind, {"metadata": _META}), "", kind))


def _decode(value: Any, shape: Any, path: str, kind: str) -> Any:
    if isinstance(shape, str):
        if shape != "any":
            _check_leaf(value, shape, path, kind)
        return value
    if isinstance(shape, list):
        if not isinstance(value, list):
            raise _undecodable(value, path, "[]", kind)
        items = enumerate(value)
        return [_decode(item, shape[0], f"{path}[{place}]", kind) for place, item in items]
    if not isinstance(value, dict):
        raise _undecodable(value, path, "object", kind)
    fields = {key: item for key, item in value.items() if item is not None}
    if isinstance(shape, tuple):
        return {key: _decode(item, shape[1], path, kind) for key, item in fields.items()}
    paths = {key: f"{path}.{key}".lstrip(".") for key in value}
    unknown = sorted(f'unknown field "{paths[key]}"' for key in value.keys() - shape)
    if unknown and any(shape is complete for complete in _COMPLETE):
        raise _unhandled(kind, f"strict decoding error: {', '.join(unknown)}")
    return {
        key: _decode(item, shape.get(key, "any"), paths[key], kind) for key, item in fields.items()
    }


def _check_leaf(value: Any, shape: str, path: str, kind: str) -> None:
    allowed = _PYTHON[shape]
    if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
        raise _undecodable(value, path, shape, kind)
    if isinstance(value, int) and shape == "int" and not -(2**63) <= value < 2**63:
        raise _undecodable(value, path, "int64", kind)
    if shape == "base64" and not _BASE64.fullmatch(re.sub(r"[\r\n]", "", str(value))):
        raise _unhandled(kind, "illegal base64 data")
    try:
        if shape == "quantity":
            quantity(value)
    except ValueError as wrong:
        raise _unhandled(kind, str(wrong)) from None


def _unhandled(kind: str, why: str) -> _refusals.ApiError:
    return _refusals.bad_request(f'{kind} in version "v1" cannot be handled as a {kind}: {why}')


def _undecodable(value: Any, path: str, wanted: str, kind: str) -> _refusals.ApiError:
    where = re.sub(r"\[\d+\]", "", path) or kind
    words = f"json: cannot unmarshal {_NAMES.get(type(value), 'null')} into Go struct field"
    return _unhandled(kind, f"{words} {where} of type {wanted}")

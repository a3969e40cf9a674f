"""The types of the fields that the stand-in reads.

Values that a real server could not decode are refused before they are used.
"""

from __future__ import annotations

import re
from typing import Any

from ..._objects import _refusals
from ..._objects._quantities import quantity

Json = dict[str, Any]

# A shape is "string", "int", "bool", "number", "quantity", "base64" or "any"; [shape] for a list;
# ("map", shape); or a dict of fields.
_REFERENCE = {"name": "string", "key": "string", "optional": "bool", "secretName": "string"}
_VOLUME_SOURCE = {**_REFERENCE, "items": [{"key": "string", "path": "string"}]}
_META = {
    "name": "string",
    "generateName": "string",
    "namespace": "string",
    "uid": "string",
    "resourceVersion": "string",
    "labels": ("map", "string"),
    "annotations": ("map", "string"),
    "finalizers": ["string"],
    "ownerReferences": [
        {"kind": "string", "name": "string", "uid": "string", "apiVersion": "string"}
    ],
}
_ENV = {
    "name": "string",
    "value": "string",
    "valueFrom": {
        "fieldRef": {"fieldPath": "string"},
        "resourceFieldRef": {"resource": "string", "divisor": "quantity"},
        "configMapKeyRef": _REFERENCE,
        "secretKeyRef": _REFERENCE,
    },
}
_SECURITY = {
    "runAsNonRoot": "bool",
    "runAsUser": "int",
    "seccompProfile": {"type": "string"},
}
_REQUIREMENT = {"key": "string", "operator": "string", "values": ["string"]}
_NODE_TERM = {"matchExpressions": [_REQUIREMENT], "matchFields": [_REQUIREMENT]}
_CONTAINER = {
    "name": "string",
    "image": "string",
    "command": ["string"],
    "args": ["string"],
    "workingDir": "string",
    "env": [_ENV],
    "envFrom": [{"prefix": "string", "configMapRef": _REFERENCE, "secretRef": _REFERENCE}],
    "resources": {"limits": ("map", "quantity"), "requests": ("map", "quantity")},
    "volumeMounts": [{"name": "string", "mountPath": "string", "subPath": "string"}],
    "terminationMessagePath": "string",
    "terminationMessagePolicy": "string",
    "securityContext": {
        **_SECURITY,
        "allowPrivilegeEscalation": "bool",
        "capabilities": {"add": ["string"], "drop": ["string"]},
        "privileged": "bool",
    },
}
_POD_SPEC = {
    "containers": [_CONTAINER],
    "initContainers": [_CONTAINER],
    "volumes": [
        {
            "name": "string",
            "configMap": _VOLUME_SOURCE,
            "secret": _VOLUME_SOURCE,
            "hostPath": {"path": "string"},
            "persistentVolumeClaim": {"claimName": "string"},
        }
    ],
    "restartPolicy": "string",
    "terminationGracePeriodSeconds": "int",
    "serviceAccountName": "string",
    "nodeName": "string",
    "hostname": "string",
    "nodeSelector": ("map", "string"),
    "priority": "int",
    "priorityClassName": "string",
    "runtimeClassName": "string",
    "securityContext": _SECURITY,
    "affinity": {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [_NODE_TERM]}
        }
    },
    "tolerations": [
        {
            "key": "string",
            "operator": "string",
            "value": "string",
            "effect": "string",
            "tolerationSeconds": "int",
        }
    ],
}
_JOB_SPEC = {
    "parallelism": "int",
    "completions": "int",
    "backoffLimit": "int",
    "backoffLimitPerIndex": "int",
    "maxFailedIndexes": "int",
    "activeDeadlineSeconds": "int",
    "ttlSecondsAfterFinished": "int",
    "suspend": "bool",
    "manualSelector": "bool",
    "completionMode": "string",
    "podReplacementPolicy": "string",
    "template": {"metadata": _META, "spec": _POD_SPEC},
    "podFailurePolicy": {
        "rules": [
            {
                "action": "string",
                "onExitCodes": {"containerName": "string", "operator": "string", "values": ["int"]},
                "onPodConditions": [{"type": "string", "status": "string"}],
            }
        ]
    },
}
_KINDS: dict[str, Any] = {
    "Job": {
        "metadata": _META,
        "spec": _JOB_SPEC,
        "status": {"conditions": [{"type": "string", "status": "string"}]},
    },
    "Pod": {
        "metadata": _META,
        "spec": _POD_SPEC,
        "status": {"conditions": [{"type": "string", "status": "string"}]},
    },
    "ConfigMap": {"metadata": _META, "data": ("map", "string"), "binaryData": ("map", "base64")},
    "Secret": {"metadata": _META, "data": ("map", "base64"), "stringData": ("map", "string")},
    "DeleteOptions": {
        "gracePeriodSeconds": "int",
        "preconditions": {"uid": "string", "resourceVersion": "string"},
        "orphanDependents": "bool",
        "propagationPolicy": "string",
        "dryRun": ["string"],
    },
    "Workload": {"metadata": _META, "spec": {"active": "bool"}},
    "ResourceQuota": {
        "metadata": _META,
        "spec": {
            "hard": ("map", "quantity"),
            "scopes": ["string"],
            "scopeSelector": {
                "matchExpressions": [
                    {"scopeName": "string", "operator": "string", "values": ["string"]}
                ]
            },
        },
    },
}
_OTHER = {"metadata": _META}
_BASE64 = re.compile(r"(?:[a-zA-Z0-9+/]{4})*(?:[a-zA-Z0-9+/]{2}==|[a-zA-Z0-9+/]{3}=)?")
_PYTHON: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "int": (int,),
    "bool": (bool,),
    "base64": (str,),
    "quantity": (str, int, float),
}


def decode(kind: str, obj: Json) -> Json:
    """Return the object without its nulls; every field has the type that it must have.

    Raises:
        ApiError: 400, in the words of the real server's decoder.
    """
    decoded = _decode(obj, _KINDS.get(kind, _OTHER), "", kind)
    return dict(decoded)


def _decode(value: Any, shape: Any, path: str, kind: str) -> Any:
    if isinstance(shape, str):
        if shape != "any":
            _leaf(value, shape, path, kind)
        return value
    if isinstance(shape, list):
        if not isinstance(value, list):
            raise _undecodable(value, path, "[]", kind)
        return [_decode(item, shape[0], path, kind) for item in value]
    if not isinstance(value, dict):
        raise _undecodable(value, path, "object", kind)
    if isinstance(shape, tuple):
        return {
            key: _decode(item, shape[1], path, kind)
            for key, item in value.items()
            if item is not None
        }
    fields = {key: item for key, item in value.items() if item is not None}
    return {
        key: _decode(item, shape.get(key, "any"), f"{path}.{key}".lstrip("."), kind)
        for key, item in fields.items()
    }


def _leaf(value: Any, shape: str, path: str, kind: str) -> None:
    allowed = _PYTHON[shape]
    if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
        raise _undecodable(value, path, shape, kind)
    if isinstance(value, int) and shape == "int" and not -(2**63) <= value < 2**63:
        raise _undecodable(value, path, "int64", kind)
    if shape == "base64" and not _BASE64.fullmatch(re.sub(r"[\r\n]", "", str(value))):
        raise _unhandled(kind, "illegal base64 data")
    if shape == "quantity":
        try:
            quantity(value)
        except ValueError as wrong:
            raise _unhandled(kind, str(wrong)) from None


def _unhandled(kind: str, why: str) -> _refusals.ApiError:
    return _refusals.bad_request(f'{kind} in version "v1" cannot be handled as a {kind}: {why}')


def _undecodable(value: Any, path: str, wanted: str, kind: str) -> _refusals.ApiError:
    names: dict[type, str] = {
        bool: "bool",
        int: "number",
        float: "number",
        str: "string",
        list: "array",
        dict: "object",
    }
    json_type = names.get(type(value), "null")
    return _unhandled(
        kind,
        f"json: cannot unmarshal {json_type} into Go struct field {path or kind} of type {wanted}",
    )

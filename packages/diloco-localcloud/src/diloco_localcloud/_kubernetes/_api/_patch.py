"""Merge patches and strategic merge patches."""

from __future__ import annotations

import copy
import json
from typing import Any

from .._objects import _refusals

Json = dict[str, Any]

MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"

# The key by which a strategic merge identifies the entries of a list, by the name of the list.
_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "ephemeralContainers": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "ports": "containerPort",
    "imagePullSecrets": "name",
    "hostAliases": "ip",
    "ownerReferences": "uid",
    "conditions": "type",
    "topologySpreadConstraints": "topologyKey",
    "secrets": "name",
}
_SETS = {"finalizers"}
_ORDER = "$setElementOrder/"


def apply(kind: str, document: Json, body: bytes) -> Json:
    """Return the object with a patch of this media type applied; the object itself stays as it is.

    Raises:
        ApiError: 400 or 415.
    """
    if kind not in (MERGE, STRATEGIC):
        raise _refusals.unsupported_media_type(kind, [MERGE, STRATEGIC])
    try:
        patch = json.loads(body or b"{}")
    except ValueError as wrong:
        raise _refusals.bad_request(f"error decoding patch: {wrong}") from None
    if not isinstance(patch, dict):
        raise _refusals.bad_request("the patch must be an object")
    return dict(merge(document, patch)) if kind == MERGE else _strategic(document, patch)


def merge(document: Any, patch: Any) -> Any:
    """Apply a merge patch as in RFC 7396."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    result = dict(document) if isinstance(document, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merge(result.get(key), value)
    return result


def _strategic(document: Any, patch: Json) -> Json:
    result = dict(document) if isinstance(document, dict) else {}
    for key, value in patch.items():
        if key.startswith("$"):
            if not key.startswith(_ORDER):
                raise _unserved(key)
        elif value is None or value == {"$patch": "delete"}:
            result.pop(key, None)
        elif isinstance(value, dict):
            result[key] = _strategic(result.get(key) or {}, value)
        elif (
            isinstance(value, list)
            and key in _KEYS
            and all(isinstance(item, dict) for item in value)
        ):
            result[key] = _merge_list(result.get(key) or [], value, _KEYS[key])
        elif isinstance(value, list) and key in _SETS:
            old = result.get(key) or []
            result[key] = old + [item for item in value if item not in old]
        else:
            result[key] = copy.deepcopy(value)
    for key, order in patch.items():
        name = key.removeprefix(_ORDER)
        field = _KEYS.get(name)
        if name != key and name in result and field:
            places = {entry.get(field): place for place, entry in enumerate(order)}
            result[name] = sorted(
                result[name], key=lambda each: places.get(each.get(field), len(places))
            )
    return result


def _merge_list(old: Any, new: list[Json], key: str) -> list[Json]:
    result = [item for item in old if isinstance(item, dict)] if isinstance(old, list) else []
    for entry in new:
        place = next(
            (place for place, item in enumerate(result) if item.get(key) == entry.get(key)), None
        )
        if entry.get("$patch") == "delete":
            if place is not None:
                del result[place]
        elif place is None:
            result.append(_strategic({}, entry))
        else:
            result[place] = _strategic(result[place], entry)
    return result


def _unserved(directive: str) -> _refusals.ApiError:
    return _refusals.bad_request(
        f"the stand-in does not serve the directive {directive} of strategic merge patches"
    )

"""Merge, JSON and strategic merge patches."""

from __future__ import annotations

import copy
from typing import Any

from .._objects import _refusals

Json = dict[str, Any]

MERGE = "application/merge-patch+json"
JSON = "application/json-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
APPLY = "application/apply-patch+yaml"

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


def apply(kind: str, document: Json, patch: Any) -> Json:
    """Return the object with a patch of this media type applied; the object itself stays as it is.

    Raises:
        ApiError: 400, 415 or 422.
    """
    if kind == JSON:
        return _json(document, patch)
    if not isinstance(patch, dict):
        raise _refusals.bad_request("the patch must be an object")
    if kind == MERGE:
        return dict(merge(document, patch))
    if kind == STRATEGIC:
        return _strategic(document, patch)
    raise _refusals.unsupported_media_type(kind, [JSON, MERGE, STRATEGIC])


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
    if patch.get("$patch") == "replace":
        return {key: copy.deepcopy(value) for key, value in patch.items() if key != "$patch"}
    result = dict(document) if isinstance(document, dict) else {}
    orders = {
        key.partition("/")[2]: value
        for key, value in patch.items()
        if key.startswith("$setElementOrder/")
    }
    for key, value in patch.items():
        if key.startswith("$deleteFromPrimitiveList/"):
            name = key.partition("/")[2]
            result[name] = [item for item in result.get(name) or [] if item not in value]
        elif key == "$retainKeys":
            result = {name: item for name, item in result.items() if name in value}
        elif key.startswith("$"):
            continue
        elif value is None:
            result.pop(key, None)
        elif isinstance(value, dict):
            if value.get("$patch") == "delete":
                result.pop(key, None)
            else:
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
    for name, order in orders.items():
        field = _KEYS.get(name)
        if name in result and field:
            places = {entry.get(field): place for place, entry in enumerate(order)}
            result[name] = sorted(
                result[name], key=lambda each: places.get(each.get(field), len(places))
            )
    return result


def _merge_list(old: Any, new: list[Json], key: str) -> list[Json]:
    if any(item.get("$patch") == "replace" for item in new):
        return [copy.deepcopy(item) for item in new if item.get("$patch") != "replace"]
    result = [item for item in old if isinstance(item, dict)] if isinstance(old, list) else []
    for entry in new:
        place = next(
            (place for place, item in enumerate(result) if item.get(key) == entry.get(key)), None
        )
        if entry.get("$patch") == "delete":
            if place is not None:
                del result[place]
        elif place is None:
            result.append(copy.deepcopy(entry))
        else:
            result[place] = _strategic(result[place], entry)
    return result


def _json(document: Json, operations: Any) -> Json:
    if not isinstance(operations, list):
        raise _refusals.bad_request("a JSON patch must be a list of operations")
    result: Any = copy.deepcopy(document)
    for operation in operations:
        try:
            result = _operate(result, operation)
        except (KeyError, IndexError, OverflowError, ValueError, TypeError) as wrong:
            message = (
                "the server rejected our request due to an error in our request: "
                f"{operation}: {wrong}"
            )
            raise _refusals.ApiError(422, "Invalid", message, {}) from None
    if not isinstance(result, dict):
        raise _refusals.ApiError(422, "Invalid", "the patch leaves no object", {})
    return result


def _operate(document: Any, operation: Json) -> Any:
    verb, path = operation["op"], _pointer(operation["path"])
    if verb == "test":
        if _read(document, path) != operation["value"]:
            raise ValueError("the test failed")
        return document
    if verb in ("move", "copy"):
        source = _pointer(operation["from"])
        value = copy.deepcopy(_read(document, source))
        if verb == "move":
            document = _change(document, source, "remove", None)
        return _change(document, path, "add", value)
    if verb in ("add", "replace", "remove"):
        return _change(document, path, verb, copy.deepcopy(operation.get("value")))
    raise ValueError(f"there is no operation {verb!r}")


def _pointer(path: Any) -> list[str]:
    if not isinstance(path, str):
        raise TypeError("a path must be a string")
    return [step.replace("~1", "/").replace("~0", "~") for step in path.split("/")[1:]]


def _read(document: Any, path: list[str]) -> Any:
    for step in path:
        document = document[int(step)] if isinstance(document, list) else document[step]
    return document


def _change(document: Any, path: list[str], verb: str, value: Any) -> Any:
    if not path:
        return value
    parent, last = _read(document, path[:-1]), path[-1]
    if isinstance(parent, list):
        if verb == "add":
            parent.insert(len(parent) if last == "-" else int(last), value)
        elif verb == "replace":
            parent[int(last)] = value
        else:
            del parent[int(last)]
    elif verb == "add":
        parent[last] = value
    elif last not in parent:
        raise KeyError(f"there is no {'/'.join(path)}")
    elif verb == "replace":
        parent[last] = value
    else:
        del parent[last]
    return document

"""Merge patches and strategic merge patches."""

from __future__ import annotations

import copy
import json
from typing import Any

from .._objects import _refusals

Json = dict[str, Any]

MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"

# The lists that a strategic merge joins item by item, by the names of their fields.
_JOINED = (
    "containers initContainers ephemeralContainers env volumes volumeMounts ports finalizers "
    "imagePullSecrets hostAliases ownerReferences conditions topologySpreadConstraints secrets"
)


def apply(kind: str, document: Json, body: bytes) -> Json:
    """Return the object with a patch of this media type applied; the object itself stays as it is.

    Raises:
        ApiError: 400 or 415.
    """
    if kind not in (MERGE, STRATEGIC):
        raise _refusals.unsupported_media_type([MERGE, STRATEGIC])
    try:
        patch = json.loads(body or b"{}")
    except ValueError as wrong:
        raise _refusals.bad_request(f"error decoding patch: {wrong}") from None
    if not isinstance(patch, dict):
        raise _refusals.bad_request("the patch must be an object")
    if kind == STRATEGIC:
        _check_plain(patch)
    return dict(merge(document, patch))


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


def _check_plain(patch: Json) -> None:
    """Refuse a strategic merge that a merge patch with the same words would not equal."""
    for key, value in patch.items():
        if key.startswith("$") or (key in _JOINED.split() and isinstance(value, list)):
            raise _refusals.bad_request(
                f"the stand-in does not serve {key} in strategic merge patches: send a patch of "
                f"type {MERGE}"
            )
        if isinstance(value, dict):
            _check_plain(value)

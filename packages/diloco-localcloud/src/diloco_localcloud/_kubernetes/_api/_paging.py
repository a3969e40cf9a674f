"""Lists in pages, by ``limit`` and ``continue``."""

from __future__ import annotations

import base64
import json
from typing import Any

from .._objects import _refusals

Json = dict[str, Any]


def page(items: list[Json], limit: int, token: str, version: int) -> tuple[list[Json], Json]:
    """Return one page of a sorted list.

    The token names the last object shown, so that no object that stays is lost if the list changes
    between two pages.

    Returns:
        The items of the page, and the list's metadata.

    Raises:
        ApiError: 400: the token was not made here.
    """
    if token:
        try:
            last = json.loads(base64.urlsafe_b64decode(token))
            after, version = (last["namespace"], last["name"]), last["version"]
            if [type(part) for part in (*after, version)] != [str, str, int]:
                raise TypeError
        except (ValueError, KeyError, TypeError, RecursionError):
            raise _refusals.bad_request(f"continue key is not valid: {token}") from None
        items = [item for item in items if _key(item) > after]
    meta: Json = {"resourceVersion": str(version)}
    if 0 < limit < len(items):
        rest = len(items) - limit
        items = items[:limit]
        namespace, name = _key(items[-1])
        mark = json.dumps({"namespace": namespace, "name": name, "version": version})
        meta |= {
            "continue": base64.urlsafe_b64encode(mark.encode()).decode(),
            "remainingItemCount": rest,
        }
    return items, meta


def _key(item: Json) -> tuple[str, str]:
    return item["metadata"].get("namespace", ""), item["metadata"]["name"]

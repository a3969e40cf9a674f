"""SelfSubjectAccessReview: tells users which verbs they may use."""

from __future__ import annotations

from typing import Any

from ._access import Access

Json = dict[str, Any]


def answer(access: Access, body: Json) -> Json:
    """Return the review with its status."""
    wanted = (body.get("spec") or {}).get("resourceAttributes") or {}
    allowed = access.allows(
        wanted.get("verb", ""),
        wanted.get("group", ""),
        wanted.get("resource", ""),
        wanted.get("subresource", ""),
        wanted.get("name", ""),
    )
    return {
        "kind": "SelfSubjectAccessReview",
        "apiVersion": "authorization.k8s.io/v1",
        "metadata": {},
        **body,
        "status": {"allowed": allowed},
    }

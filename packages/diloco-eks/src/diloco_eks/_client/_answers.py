"""Checks that an answer comes from the cluster itself.

The cluster's own answer is of the kind, and about the object, that was asked for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from diloco_protocol import UnavailableError
from diloco_protocol.backend import shown

from .._state._reading import mapping
from ._errors import MissingError

Json = dict[str, Any]
_LOOK = "look at what stands between, such as a proxy"


def own_answer(
    answer: object, what: str, kind: str, name: str = "", space: str = "", *, removed: bool = False
) -> Json:
    """Return an answer that reports success, if it is the cluster's own.

    Args:
        answer: The JSON of the answer.
        what: What was tried, in words.
        kind: The kind of object that was asked for.
        name: Name of the object that was asked for; empty if none was named.
        space: The namespace that was asked for; an answer about an object in another namespace is
            refused.
        removed: Whether a Status is accepted too, which says that the object is gone.

    Raises:
        UnavailableError: The answer is of another kind, or about another object.
    """
    read: Json = answer if isinstance(answer, dict) else {}
    metadata, details = mapping(read.get("metadata")), mapping(read.get("details"))
    if removed and read.get("kind") == "Status":
        about = details.get("name")
        same = about == name and _is_of(details.get("kind"), kind)
        is_own = read.get("status") == "Success" and same
    else:
        about = metadata.get("name")
        is_own = read.get("kind") == kind and _has_whole_items(read)
        if name:  # every object of a cluster has a uid
            uid = metadata.get("uid")
            is_own = is_own and about == name and isinstance(uid, str) and uid != ""
    objects = (read, *(read.get("items") or ())) if is_own else ()
    places = {mapping(item.get("metadata")).get("namespace") or space for item in objects}
    if is_own and (not space or places == {space}):
        return read
    description = f"kind {shown(read.get('kind'))}, name {shown(about)}"
    if is_own:
        description = f"the namespace {shown(sorted(places, key=str))}"
    raise UnavailableError(
        f"cannot {what}: the answer is about {description}, so it is not the cluster's own: {_LOOK}"
    )


@contextlib.contextmanager
def missing_only(kind: str, name: str) -> Iterator[None]:
    """Let a MissingError pass only if the cluster itself says that this very object is missing.

    A proxy sends 404s of its own, and another API server behind it may say NotFound of something
    else.

    Raises:
        UnavailableError: A 404 was about another object, or about none.
    """
    try:
        yield
    except MissingError as error:
        about, called = error.about
        if name and called == name and _is_of(about, kind):
            raise
        raise UnavailableError(
            f"{error}. This answer (status 404) is not about the {kind} {name or 'list'}: {_LOOK}"
        ) from error


def _is_of(resource: object, kind: str) -> bool:
    """Return whether the resource that an answer names, if any, belongs to a kind.

    "jobs" belongs to Job, and "pods/log" to Pod.
    """
    called = resource.lower() if isinstance(resource, str) else ""
    return called.partition("/")[0].removesuffix("s") in {"", kind.lower()}


def _has_whole_items(read: Json) -> bool:
    items = read.get("items") or []
    return isinstance(items, list) and all(
        isinstance(item, dict) and isinstance(item.get("metadata"), dict) for item in items
    )

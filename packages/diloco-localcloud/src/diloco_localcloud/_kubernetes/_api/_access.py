"""Paths of the API, and the permissions of the user: bearer tokens, and rules as in a Role."""

from __future__ import annotations

import hmac
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .._objects import _refusals, _resources
from .._objects._resources import Resource


@dataclass(frozen=True)
class Route:
    """The objects that a path names."""

    resource: Resource
    namespace: str = ""
    name: str = ""
    subresource: str = ""

    @property
    def what(self) -> str:
        """Return ``pods``, or ``pods/log``."""
        plural = self.resource.plural
        return f"{plural}/{self.subresource}" if self.subresource else plural


def parse(path: str) -> Route | None:
    """Return the objects that a path names; None if it names none.

    Paths are ``/api/v1/namespaces/a/pods/b/log`` and the like; ``/apis/<group>/<version>/…`` for
    named groups.
    """
    steps = [step for step in path.split("/") if step]
    if steps[:1] == ["api"] and len(steps) >= 3:
        group, version, steps = "", steps[1], steps[2:]
    elif steps[:1] == ["apis"] and len(steps) >= 4:
        group, version, steps = steps[1], steps[2], steps[3:]
    else:
        return None
    namespace = ""
    if steps[0] == "namespaces" and len(steps) >= 3 and _resources.find(group, version, steps[2]):
        namespace, steps = steps[1], steps[2:]
    resource = _resources.find(group, version, steps[0])
    if resource is None or len(steps) > 3 or (namespace and not resource.namespaced):
        return None
    subresource = steps[2] if len(steps) > 2 else ""
    if subresource and subresource not in resource.subresources:
        return None
    return Route(resource, namespace, steps[1] if len(steps) > 1 else "", subresource)


Json = dict[str, Any]


class Access:
    """The rules for the one user; thread-safe.

    Attributes:
        user: the name that refusals give the user.
        token: the bearer token that is accepted; None accepts every request.
    """

    def __init__(self, user: str, token: str | None) -> None:
        self.user = user
        self.token = token
        self._lock = threading.Lock()
        self._rules: list[Json] | None = None
        self._denied: set[tuple[str, str]] = set()

    def only(self, rules: Iterable[Mapping[str, Any]] | None) -> None:
        """Allow only what these rules allow; None allows all.

        They are written like ``rules`` of a Role: apiGroups, resources, verbs, resourceNames.
        """
        kept = None if rules is None else [dict(rule) for rule in rules]
        with self._lock:
            self._rules = kept

    def deny(self, verb: str, resource: str) -> None:
        """Refuse one verb on a resource (``jobs``, ``pods/log``, …), whatever the rules say."""
        with self._lock:
            self._denied.add((verb, resource))

    def allow(self, verb: str, resource: str) -> None:
        """Take a ``deny`` back."""
        with self._lock:
            self._denied.discard((verb, resource))

    def authenticate(self, header: str) -> None:
        """Check the Authorization header, whose scheme may be in any case.

        Raises:
            ApiError: 401.
        """
        scheme, _, token = header.partition(" ")
        if self.token is not None and not (
            scheme.lower() == "bearer" and hmac.compare_digest(token.encode(), self.token.encode())
        ):
            raise _refusals.unauthorized()

    def check(self, verb: str, route: Route) -> None:
        """Check one call.

        Raises:
            ApiError: 403.
        """
        if not self.allows(verb, route.resource.group, route.what, route.name):
            raise self.refusal(verb, route)

    def refusal(self, verb: str, route: Route) -> _refusals.ApiError:
        """Return the 403 for one call."""
        where = (route.resource, route.namespace, route.name, route.subresource)
        return _refusals.forbidden(self.user, verb, *where)

    def allows(self, verb: str, group: str, what: str, name: str = "") -> bool:
        """Return whether the user may do this to ``pods``, ``pods/log`` or the like."""
        with self._lock:
            if (verb, what) in self._denied:
                return False
            if self._rules is None or what == "selfsubjectaccessreviews":
                return True
            return any(_covers(rule, verb, group, what, name) for rule in self._rules)


def _covers(rule: Json, verb: str, group: str, what: str, name: str) -> bool:
    def has(field: str, value: str) -> bool:
        return value in rule.get(field, ()) or "*" in rule.get(field, ())

    names = rule.get("resourceNames")
    return (
        has("verbs", verb)
        and has("apiGroups", group)
        and has("resources", what)
        and (not names or name in names)
    )

"""The objects, their versions, and the history of their changes."""

from __future__ import annotations

import copy
import random
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from . import _refusals
from ._resources import Resource

Json = dict[str, Any]

# The letters of generated names: without vowels, so that no words can arise.
_LETTERS = "bcdfghjklmnpqrstvwxz2456789"
# A watch from before the oldest kept change gets a 410, as with a compacted etcd.
_HISTORY = 10_000


@dataclass(frozen=True)
class Change:
    """One step of one object; ``old`` is None for the first and ``new`` for the last."""

    version: int
    resource: Resource
    old: Json | None
    new: Json | None


class Store:
    """All objects by kind, namespace and name.

    Objects that were put in or taken out are never changed in place: an update puts a new one. Not
    thread-safe: the cluster calls it under its lock.
    """

    def __init__(self, stamp: Callable[[], str], seed: int) -> None:
        self._stamp = stamp
        self._random = random.Random(seed)
        self._objects: dict[str, dict[tuple[str, str], Json]] = {}
        self._owned: dict[str, set[tuple[str, str, str]]] = {}
        self.version = 1000
        self.changes: deque[Change] = deque(maxlen=_HISTORY)
        self.listeners: list[Callable[[Change], None]] = []

    def suffix(self) -> str:
        """Return five letters for the end of a generated name."""
        return "".join(self._random.choices(_LETTERS, k=5))

    def uid(self) -> str:
        """Return a new uid; equal seeds give equal uids."""
        return str(uuid.UUID(int=self._random.getrandbits(128), version=4))

    def find(self, resource: Resource, namespace: str, name: str) -> Json | None:
        """Return the object, or None."""
        return self._objects.get(resource.qualified, {}).get((namespace, name))

    def get(self, resource: Resource, namespace: str, name: str) -> Json:
        """Return the object.

        Raises:
            ApiError: 404.
        """
        obj = self.find(resource, namespace, name)
        if obj is None:
            raise _refusals.not_found(resource, name)
        return obj

    def list(self, resource: Resource, namespace: str = "") -> list[Json]:
        """Return the objects of a namespace, or of all, ordered by namespace and name."""
        table = self._objects.get(resource.qualified, {})
        return [table[key] for key in sorted(table) if not namespace or key[0] == namespace]

    def by_age(self, resource: Resource, namespace: str) -> Sequence[Json]:
        """Return a namespace's objects, oldest first; creationTimestamp is too coarse for that."""
        table = self._objects.get(resource.qualified, {})
        return [obj for (where, _), obj in table.items() if where == namespace]

    def owned(self, uid: str) -> Iterator[tuple[str, Json]]:
        """Yield (kind of table, object) for all that name ``uid`` as an owner."""
        for kind, namespace, name in sorted(self._owned.get(uid, ())):
            yield kind, self._objects[kind][namespace, name]

    def prepare(self, resource: Resource, body: Json) -> Json:
        """Return a copy of ``body`` with the metadata that the server gives a new object."""
        new = copy.deepcopy(body)
        meta = new.setdefault("metadata", {})
        if not meta.get("name") and meta.get("generateName"):
            meta["name"] = meta["generateName"][:58] + self.suffix()
        meta["uid"] = self.uid()
        meta["creationTimestamp"] = self._stamp()
        for field in ("deletionTimestamp", "deletionGracePeriodSeconds", "resourceVersion"):
            meta.pop(field, None)
        if "spec" in new:
            meta["generation"] = 1
        return {"kind": resource.kind, "apiVersion": resource.api_version, **new}

    def add(self, resource: Resource, new: Json) -> Json:
        """Put a prepared object.

        Raises:
            ApiError: 409, there is an object of this name.
        """
        meta = new["metadata"]
        old = self.find(resource, meta.get("namespace", ""), meta["name"])
        if old is not None:
            deleting = "deletionTimestamp" in old["metadata"]
            raise _refusals.already_exists(resource, meta["name"], deleting=deleting)
        return self._put(resource, None, new)

    def replace(self, resource: Resource, new: Json, *, keep: bool = False) -> Json | None:
        """Put a new version of an object, and return the old or the new one.

        Without ``keep`` the object is removed, and the result is None, if it is being deleted and
        neither a finalizer nor a grace period holds it.
        """
        meta = dict(new["metadata"])
        new = {**new, "metadata": meta}
        old = self.get(resource, meta.get("namespace", ""), meta["name"])
        if new.get("spec") != old.get("spec"):
            meta["generation"] = old["metadata"].get("generation", 0) + 1
        unheld = not meta.get("finalizers") and not meta.get("deletionGracePeriodSeconds")
        if "deletionTimestamp" in meta and unheld and not keep:
            self.remove(resource, meta.get("namespace", ""), meta["name"])
            return None
        return old if _same(old, new) else self._put(resource, old, new)

    def remove(self, resource: Resource, namespace: str, name: str) -> None:
        """Take an object out at once."""
        old = self.get(resource, namespace, name)
        del self._objects[resource.qualified][namespace, name]
        for reference in old["metadata"].get("ownerReferences", []):
            self._owned.get(reference["uid"], set()).discard((resource.qualified, namespace, name))
        self._tell(resource, old, None)

    def _put(self, resource: Resource, old: Json | None, new: Json) -> Json:
        meta = new["metadata"]
        key = (meta.get("namespace", ""), meta["name"])
        for reference in (old or {}).get("metadata", {}).get("ownerReferences", []):
            self._owned.get(reference["uid"], set()).discard((resource.qualified, *key))
        for reference in meta.get("ownerReferences", []):
            self._owned.setdefault(reference["uid"], set()).add((resource.qualified, *key))
        self.version += 1
        meta["resourceVersion"] = str(self.version)
        self._objects.setdefault(resource.qualified, {})[key] = new
        self._tell(resource, old, new)
        return new

    def _tell(self, resource: Resource, old: Json | None, new: Json | None) -> None:
        if new is None:
            self.version += 1
        change = Change(self.version, resource, old, new)
        self.changes.append(change)
        for listener in self.listeners:
            listener(change)


def _same(old: Json, new: Json) -> bool:
    def bare(obj: Json) -> Json:
        return {**obj, "metadata": {**obj["metadata"], "resourceVersion": ""}}

    return bare(old) == bare(new)

"""The namespace controller: takes out what is in a namespace that was deleted, and then the namespace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .._objects._resources import ALL, JOBS, NAMESPACES, PODS
from ._delays import Delay

if TYPE_CHECKING:
    from .._objects._store import Change
    from ._cluster import Cluster

Json = dict[str, Any]

EMPTY = Delay(0.1, 0.05, 1.0)  # from a change to a look at a namespace that is being deleted
_OTHERS = [each for each in ALL if each.namespaced and each not in (JOBS, PODS)]


class NamespaceController:
    """Looks after the namespaces of a cluster from now on. All methods run under the cluster's lock."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        cluster.store.listeners.append(self._heard)

    def _heard(self, change: Change) -> None:
        name = ""
        if change.resource is NAMESPACES and change.new is not None:
            name = change.new["metadata"]["name"]
        elif change.resource in (PODS, JOBS) and change.new is None and change.old is not None:
            name = change.old["metadata"]["namespace"]
        if name and self._terminating(name):
            seconds = self._cluster.delays.of(EMPTY)
            self._cluster.timeline.after(seconds, lambda: self._empty(name))

    def _terminating(self, name: str) -> bool:
        namespace = self._cluster.store.find(NAMESPACES, "", name)
        return namespace is not None and "deletionTimestamp" in namespace["metadata"]

    def _empty(self, name: str) -> None:
        """Take out what there is, tell the pods to go, and take the namespace out once they have."""
        if not self._terminating(name):
            return
        cluster, store = self._cluster, self._cluster.store
        for job in store.list(JOBS, name):
            cluster.delete_job(name, job["metadata"]["name"], "Background")
        for pod in store.list(PODS, name):
            cluster.release(pod)
            if store.find(PODS, name, pod["metadata"]["name"]) is not None:
                cluster.delete_pod(name, pod["metadata"]["name"])
        for resource in _OTHERS:
            for obj in store.list(resource, name):
                store.remove(resource, name, obj["metadata"]["name"])
        if not store.list(PODS, name) and not store.list(JOBS, name):
            store.remove(NAMESPACES, "", name)

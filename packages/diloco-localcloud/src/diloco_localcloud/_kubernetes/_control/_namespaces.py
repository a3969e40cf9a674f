"""The namespace controller: empties a deleted namespace, its pods first."""

from __future__ import annotations

from typing import Any

from .._objects._resources import ALL, JOBS, NAMESPACES, PODS
from .._objects._store import Change
from .._pods import _facts
from ._cluster import Cluster
from ._delays import Delay

Json = dict[str, Any]

EMPTY = Delay(0.1, 0.05, 1.0)  # from the delete of a namespace to the first look at it
HELD_SECONDS = 15.0  # the time that the controller expects of objects that a finalizer holds
_OTHERS = [resource for resource in ALL if resource.namespaced and resource not in (JOBS, PODS)]


class NamespaceController:
    """Looks after the namespaces of a cluster. All methods run under the cluster's lock.

    The order is that of KEP-5080, "Ordered Namespace Deletion", which Kubernetes has from 1.33 on.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        cluster.store.listeners.append(self._heard)

    def _heard(self, change: Change) -> None:
        if change.resource is NAMESPACES and change.new is not None:
            name = change.new["metadata"]["name"]
            if self._cluster.is_terminating(name):
                self._look_in(self._cluster.delays.of(EMPTY), name)

    def _look_in(self, seconds: float, name: str) -> None:
        self._cluster.timeline.after(seconds, lambda: self._empty(name))

    def _empty(self, name: str) -> None:
        """Delete the pods, and everything else once they have gone."""
        cluster, store = self._cluster, self._cluster.store
        if not cluster.is_terminating(name):
            return
        for pod in store.list(PODS, name):
            cluster.delete_pod(name, pod["metadata"]["name"])
        pods = store.list(PODS, name)
        if pods:
            self._look_in(_patience(pods), name)
            return
        for job in store.list(JOBS, name):
            cluster.delete_job(name, job["metadata"]["name"], "Background")
        for resource in _OTHERS:
            for obj in store.list(resource, name):
                store.remove(resource, name, obj["metadata"]["name"])
        if store.list(JOBS, name):
            self._look_in(HELD_SECONDS / 2 + 1, name)
        else:
            store.remove(NAMESPACES, "", name)


def _patience(pods: list[Json]) -> float:
    """Return how long to wait: half of the expected time and a second, as in the source."""
    graces = [
        float(pod["spec"].get("terminationGracePeriodSeconds", 30))
        for pod in pods
        if not _facts.ended(pod)
    ]
    return max(graces, default=HELD_SECONDS) // 2 + 1

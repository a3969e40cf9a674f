"""What follows a delete: the objects of a Job go, and those of a namespace, its pods first."""

from __future__ import annotations

import functools
from typing import Any

from .._jobs import _status
from .._objects._resources import ALL, CONFIG_MAPS, JOBS, NAMESPACES, PODS
from .._objects._store import Change
from .._pods import _facts
from ._cluster import Cluster
from ._delays import Delay

Json = dict[str, Any]

COLLECT = Delay(0.1, 0.05, 0.5)  # from the end of an owner to the delete of its objects
FOREGROUND = Delay(0.3, 0.1, 0.8)
EMPTY = Delay(0.1, 0.05, 1.0)  # from the delete of a namespace to the first look at it
HELD_SECONDS = 15.0  # the time that the controller expects of objects that a finalizer holds
_OTHERS = [resource for resource in ALL if resource.namespaced and resource not in (JOBS, PODS)]


class GarbageCollector:
    """Deletes the objects of a Job that is deleted, or whose TTL is over.

    All methods run under the cluster's lock.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._store = cluster.store
        self._timeline = cluster.timeline
        cluster.store.listeners.append(self._heard)

    def _heard(self, change: Change) -> None:
        old, new, delays = change.old, change.new, self._cluster.delays
        if change.resource is PODS and new is None and old is not None:
            for owner in old["metadata"].get("ownerReferences", []):
                args = (owner["uid"], old["metadata"]["namespace"], owner["name"])
                finish = functools.partial(self._finish_delete, *args)
                self._timeline.after(delays.of(COLLECT), finish)
        if change.resource is not JOBS or old is None:
            return
        if new is None:
            uid = old["metadata"]["uid"]
            self._timeline.after(delays.of(COLLECT), lambda: self._collect(uid))
            return
        if "deletionTimestamp" in new["metadata"] and "deletionTimestamp" not in old["metadata"]:
            self._timeline.after(delays.of(FOREGROUND), lambda: self._delete(new))
        self._watch_ttl(new)

    def _collect(self, uid: str) -> None:
        """Take out the objects of a Job that no longer exists."""
        self._end_pods(uid)
        owned = [obj["metadata"] for kind, obj in self._store.owned(uid) if kind == "configmaps"]
        for meta in owned:
            self._store.remove(CONFIG_MAPS, meta["namespace"], meta["name"])

    def _delete(self, job: Json) -> None:
        """Do what the finalizers of a Job that is being deleted ask for."""
        meta = job["metadata"]
        if "orphan" in meta["finalizers"]:
            self._orphan(meta["namespace"], meta["name"], meta["uid"])
            return
        self._end_pods(meta["uid"])
        self._finish_delete(meta["uid"], meta["namespace"], meta["name"])

    def _watch_ttl(self, job: Json) -> None:
        seconds = job["spec"].get("ttlSecondsAfterFinished")
        if seconds is None or not _status.finished(job) or "deletionTimestamp" in job["metadata"]:
            return
        meta = job["metadata"]

        def expire() -> None:
            stored = self._job(meta["namespace"], meta["name"], meta["uid"])
            ttl = None if stored is None else stored["spec"].get("ttlSecondsAfterFinished")
            if ttl is not None and _status.finish_time(stored or {}) + ttl <= self._timeline.now():
                self._cluster.delete_job(meta["namespace"], meta["name"], "Foreground")

        self._timeline.after(_status.finish_time(job) + seconds - self._timeline.now(), expire)

    def _job(self, namespace: str, name: str, uid: str) -> Json | None:
        job = self._store.find(JOBS, namespace, name)
        return job if job is not None and job["metadata"]["uid"] == uid else None

    def _owned_pods(self, uid: str) -> list[Json]:
        return [pod for kind, pod in self._store.owned(uid) if kind == "pods"]

    def _end_pods(self, uid: str) -> None:
        for pod in self._owned_pods(uid):
            meta = pod["metadata"]
            self._cluster.release(pod)
            # A pod that was already being deleted, and that no other finalizer held, is gone now.
            if self._cluster.pod(meta) is not None:
                self._cluster.delete_pod(meta["namespace"], meta["name"])

    def _finish_delete(self, uid: str, namespace: str, name: str) -> None:
        job = self._job(namespace, name, uid)
        if job is not None and "deletionTimestamp" in job["metadata"] and not self._owned_pods(uid):
            self._take_finalizer(job, "foregroundDeletion")

    def _orphan(self, namespace: str, name: str, uid: str) -> None:
        for pod in self._owned_pods(uid):
            self._cluster.release(pod)
            stored = self._cluster.pod(pod["metadata"])
            if stored is not None:
                meta = dict(stored["metadata"])
                del meta["ownerReferences"]
                self._store.replace(PODS, {**stored, "metadata": meta})
        job = self._job(namespace, name, uid)
        if job is not None:
            self._take_finalizer(job, "orphan")

    def _take_finalizer(self, job: Json, taken: str) -> None:
        left = [name for name in job["metadata"].get("finalizers", []) if name != taken]
        self._store.replace(JOBS, {**job, "metadata": {**job["metadata"], "finalizers": left}})


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

"""The garbage collector: deletes the objects of a Job that is deleted, or whose TTL is over."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from .._jobs import _status
from .._objects._resources import CONFIG_MAPS, JOBS, PODS
from .._objects._store import Change
from ._cluster import Cluster
from ._delays import Delay

Json = dict[str, Any]

COLLECT = Delay(0.1, 0.05, 0.5)  # from the end of an owner to the delete of its objects
FOREGROUND = Delay(0.3, 0.1, 0.8)


class GarbageCollector:
    """Looks after the objects that Jobs own. All methods run under the cluster's lock."""

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
            stored = self._store.find(JOBS, meta["namespace"], meta["name"])
            if stored is None or stored["metadata"]["uid"] != meta["uid"]:
                return
            ttl = stored["spec"].get("ttlSecondsAfterFinished")
            if ttl is not None and _status.finish_time(stored) + ttl <= self._timeline.now():
                self._cluster.delete_job(meta["namespace"], meta["name"], "Foreground")

        self._timeline.after(
            max(0.0, _status.finish_time(job) + seconds - self._timeline.now()), expire
        )

    def _owned_pods(self, uid: str) -> list[Json]:
        return [pod for kind, pod in self._store.owned(uid) if kind == "pods"]

    def _end_pods(self, uid: str) -> None:
        for pod in self._owned_pods(uid):
            meta = pod["metadata"]
            self._cluster.release(pod)
            # A pod that was already being deleted, and that no other finalizer held, is gone now.
            if self._cluster.pod(meta["namespace"], meta["name"], meta["uid"]) is not None:
                self._cluster.delete_pod(meta["namespace"], meta["name"])

    def _finish_delete(self, uid: str, namespace: str, name: str) -> None:
        job = self._store.find(JOBS, namespace, name)
        if job is None or job["metadata"]["uid"] != uid:
            return
        if "deletionTimestamp" in job["metadata"] and not self._owned_pods(uid):
            self._take_finalizers(job, {"foregroundDeletion"})

    def _orphan(self, namespace: str, name: str, uid: str) -> None:
        for pod in self._owned_pods(uid):
            self._cluster.release(pod)
            stored = self._cluster.pod(namespace, pod["metadata"]["name"], pod["metadata"]["uid"])
            if stored is not None:
                meta = {
                    key: value
                    for key, value in stored["metadata"].items()
                    if key != "ownerReferences"
                }
                self._store.replace(PODS, {**stored, "metadata": meta})
        job = self._store.find(JOBS, namespace, name)
        if job is not None and job["metadata"]["uid"] == uid:
            self._take_finalizers(job, {"orphan"})

    def _take_finalizers(self, job: Json, names: Iterable[str]) -> None:
        left = [name for name in job["metadata"].get("finalizers", []) if name not in names]
        self._store.replace(JOBS, {**job, "metadata": {**job["metadata"], "finalizers": left}})

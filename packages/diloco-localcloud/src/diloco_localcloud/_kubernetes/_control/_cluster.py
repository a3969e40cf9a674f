"""The cluster: store, clock, garbage collection; and whatever runs the pods."""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any

from ..._server import _timeline
from .._admission import _quota
from .._jobs import _status
from .._objects._resources import (
    CONFIG_MAPS,
    JOBS,
    KUEUE,
    KUEUE_VERSIONS,
    NAMESPACES,
    NODES,
    PODS,
    QUOTAS,
    SERVICE_ACCOUNTS,
)
from .._objects._store import Store
from .._pods import _facts, _states
from ._delays import Delay, Delays
from ._events import Recorder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from .._objects._store import Change
    from ._runtime import Runtime

Json = dict[str, Any]

COLLECT = Delay(0.1, 0.05, 0.5)  # from the end of an owner to the delete of what it owned
FOREGROUND = Delay(0.3, 0.1, 0.8)
# A pod whose last delete is written is seen so for a moment: of 30, 4 were.
LAST_DELETE = Delay(0.0, 0.0, 0.4)
UNSCHEDULED_SECONDS = 20.0  # until a deleted pod that never had a node is made Failed


class Cluster:
    """What the API, the controllers and the pods share; ``changed`` is the lock that guards all of it.

    It knows none of them: a controller (of Jobs, Kueue) is made with the cluster and listens to the changes of its store, and
    what runs the pods makes itself its ``runtime``.
    """

    def __init__(
        self,
        timeline: _timeline.Timeline,
        *,
        seed: int,
        nodes: Iterable[Json],
        strict_timing: int | None = None,
    ) -> None:
        self.timeline = timeline
        self.delays = Delays(strict_timing)
        self.changed = threading.Condition(threading.RLock())
        self.store = Store(timeline.stamp, seed)
        self.events = Recorder(self.store, timeline)
        self.stopped = False
        self.admission: Callable[[Json], Json] = lambda job: job  # what a webhook does to new Jobs
        # Versions of groups that are not installed.
        self.absent = {f"{KUEUE}/{version}" for version in KUEUE_VERSIONS}
        self.lost: set[str] = set()  # nodes whose kubelet does not answer
        self.runtime: Runtime
        self.store.listeners.append(self._heard)
        with self.changed:
            for name in ("default", "kube-system"):
                self.add_namespace({"metadata": {"name": name}})
            for node in nodes:
                self.add_node(node)

    def add_node(self, body: Json) -> None:
        """A node, which answers."""
        self.lost.discard(body["metadata"]["name"])
        self.store.add(NODES, self.store.prepare(NODES, body))

    def add_namespace(self, body: Json) -> Json:
        """A namespace with its default service account."""
        name = body["metadata"]["name"]
        labels = {"kubernetes.io/metadata.name": name, **(body["metadata"].get("labels") or {})}
        meta = {**body["metadata"], "labels": labels}
        new = {
            **body,
            "metadata": meta,
            "spec": {"finalizers": ["kubernetes"]},
            "status": {"phase": "Active"},
        }
        made = self.store.add(NAMESPACES, self.store.prepare(NAMESPACES, new))
        account = {"metadata": {"name": "default", "namespace": name}}
        self.store.add(SERVICE_ACCOUNTS, self.store.prepare(SERVICE_ACCOUNTS, account))
        return made

    def job(self, namespace: str, name: str) -> Json:
        """The Job as stored, which is not to be changed.

        Raises:
            LookupError: there is no such Job.
        """
        with self.changed:
            job = self.store.find(JOBS, namespace, name)
        if job is None:
            raise LookupError(f"there is no Job {namespace}/{name}")
        return job

    # -- pods ----------------------------------------------------------------------------------------------------------

    def pod(self, namespace: str, name: str, uid: str) -> Json | None:
        """The pod if it is still this one."""
        pod = self.store.find(PODS, namespace, name)
        return pod if pod is not None and pod["metadata"]["uid"] == uid else None

    def pods_of(self, namespace: str, job: str | None) -> list[Json]:
        """The pods of a Job by name, or all pods, by index and then age."""
        with self.changed:
            listed = self.store.by_age(PODS, namespace)
        label = "batch.kubernetes.io/job-name"
        chosen = [
            pod
            for pod in listed
            if job is None or (pod["metadata"].get("labels") or {}).get(label) == job
        ]
        return sorted(chosen, key=lambda pod: _facts.index_of(pod) or 0)

    def put_pod(self, pod: Json) -> None:
        """Write a pod that a pure step made from the stored one."""
        self.store.replace(PODS, {**pod, "metadata": dict(pod["metadata"])})

    def out_of_reach(self, pod: Json) -> bool:
        """Whether its node is lost."""
        return pod["spec"].get("nodeName") in self.lost

    def disrupt(self, pod: Json, reason: str, message: str) -> None:
        """Mark a pod with DisruptionTarget, and tell it to go."""
        self.put_pod(_states.disrupted(pod, reason, message, self.timeline.stamp()))
        self.delete_pod(pod["metadata"]["namespace"], pod["metadata"]["name"])

    def release(self, pod: Json) -> None:
        """Take the Job controller's finalizer off."""
        meta = pod["metadata"]
        stored = self.pod(meta["namespace"], meta["name"], meta["uid"])
        if stored is None or not _facts.tracked(stored):
            return
        left = [each for each in stored["metadata"]["finalizers"] if each != _facts.TRACKING]
        new_meta = {key: value for key, value in stored["metadata"].items() if key != "finalizers"}
        if left:
            new_meta["finalizers"] = left
        self.store.replace(PODS, {**stored, "metadata": new_meta})

    def delete_pod(self, namespace: str, name: str, grace: int | None = None) -> Json | None:
        """Tell a pod to go, as the API does.

        Args:
            namespace: of the pod.
            name: of the pod.
            grace: seconds it may take; None for its own ``terminationGracePeriodSeconds``.

        Returns:
            The pod as it is now, or None if it went at once.
        """
        pod = self.store.get(PODS, namespace, name)
        meta = dict(pod["metadata"])
        of_pod = int(pod["spec"].get("terminationGracePeriodSeconds", 30))
        seconds = of_pod if grace is None else grace
        if "nodeName" not in pod["spec"] or _facts.ended(pod):
            seconds = 0
        if _facts.deleting(pod) and seconds >= meta.get("deletionGracePeriodSeconds", 0):
            return pod
        meta["deletionTimestamp"] = _timeline.stamp(self.timeline.now() + seconds)
        meta["deletionGracePeriodSeconds"] = seconds
        if self.store.replace(PODS, {**pod, "metadata": meta}) is None:
            return None
        stored = self.store.get(PODS, namespace, name)
        if "nodeName" not in pod["spec"]:
            self.timeline.after(UNSCHEDULED_SECONDS, lambda: self._collect_unscheduled(stored))
        elif not _facts.ended(pod):
            self.runtime.deleting(stored)
        return stored

    def _collect_unscheduled(self, pod: Json) -> None:
        meta = pod["metadata"]
        stored = self.pod(meta["namespace"], meta["name"], meta["uid"])
        if stored is not None and not _facts.ended(stored):
            self.put_pod(_states.with_status(stored, phase="Failed"))

    def gone(self, pod: Json) -> None:
        """The kubelet is done with a deleted pod: it goes as soon as nothing holds it.

        As observed, the kubelet's last delete writes the time of the deletion anew, a second after the end, with no grace.
        """
        meta = pod["metadata"]
        stored = self.pod(meta["namespace"], meta["name"], meta["uid"])
        if stored is None or not _facts.deleting(stored):
            return
        ends = [end.get("finishedAt") for end in _facts.terminations(stored)]
        moments = [_timeline.seconds(end) + 1.0 for end in ends if end]
        last = {
            "deletionTimestamp": _timeline.stamp(max([self.timeline.now(), *moments])),
            "deletionGracePeriodSeconds": 0,
        }
        self.store.replace(PODS, {**stored, "metadata": {**stored["metadata"], **last}}, keep=True)
        seconds = self.delays.of(LAST_DELETE)
        if seconds:
            self.timeline.after(seconds, lambda: self._take_out(meta))
        else:
            self._take_out(meta)

    def _take_out(self, meta: Json) -> None:
        stored = self.pod(meta["namespace"], meta["name"], meta["uid"])
        if stored is not None:
            self.store.replace(PODS, {**stored, "metadata": dict(stored["metadata"])})

    # -- jobs ----------------------------------------------------------------------------------------------------------

    def delete_job(self, namespace: str, name: str, policy: str) -> Json:
        """Delete a Job.

        Args:
            namespace: of the Job.
            name: of the Job.
            policy: ``Background``, ``Foreground`` or ``Orphan``.

        Returns:
            The Job as it was last.
        """
        job = self.store.get(JOBS, namespace, name)
        uid = job["metadata"]["uid"]
        if policy == "Background" and not job["metadata"].get("finalizers"):
            self.store.remove(JOBS, namespace, name)
            self.timeline.after(self.delays.of(COLLECT), lambda: self._end_pods(uid))
            return job
        if "deletionTimestamp" in job["metadata"]:
            return job
        finalizer = {"Foreground": "foregroundDeletion", "Orphan": "orphan"}.get(policy)
        meta = {
            **job["metadata"],
            "deletionTimestamp": self.timeline.stamp(),
            "deletionGracePeriodSeconds": 0,
            "finalizers": [
                *job["metadata"].get("finalizers", []),
                *([finalizer] if finalizer else []),
            ],
        }
        self.store.replace(JOBS, {**job, "metadata": meta})
        seconds = self.delays.of(FOREGROUND)
        if policy == "Orphan":
            self.timeline.after(seconds, lambda: self._orphan(namespace, name, uid))
        else:
            self.timeline.after(seconds, lambda: self._end_pods(uid))
            self.timeline.after(seconds, lambda: self._finish_delete(uid, namespace, name))
        return self.store.get(JOBS, namespace, name)

    def _owned_pods(self, uid: str) -> list[Json]:
        return [pod for kind, pod in self.store.owned(uid) if kind == "pods"]

    def _end_pods(self, uid: str) -> None:
        for pod in self._owned_pods(uid):
            meta = pod["metadata"]
            self.release(pod)
            # A pod that was being deleted already, and was held by nothing else, has gone with its finalizer.
            if self.pod(meta["namespace"], meta["name"], meta["uid"]) is not None:
                self.delete_pod(meta["namespace"], meta["name"])

    def _finish_delete(self, uid: str, namespace: str, name: str) -> None:
        job = self.store.find(JOBS, namespace, name)
        if job is None or job["metadata"]["uid"] != uid:
            return
        if "deletionTimestamp" in job["metadata"] and not self._owned_pods(uid):
            self._take_finalizers(job, {"foregroundDeletion"})

    def _collect_maps(self, uid: str) -> None:
        owned = [obj["metadata"] for kind, obj in self.store.owned(uid) if kind == "configmaps"]
        for meta in owned:
            self.store.remove(CONFIG_MAPS, meta["namespace"], meta["name"])

    def _orphan(self, namespace: str, name: str, uid: str) -> None:
        for pod in self._owned_pods(uid):
            self.release(pod)
            stored = self.pod(namespace, pod["metadata"]["name"], pod["metadata"]["uid"])
            if stored is not None:
                meta = {
                    key: value
                    for key, value in stored["metadata"].items()
                    if key != "ownerReferences"
                }
                self.store.replace(PODS, {**stored, "metadata": meta})
        job = self.store.find(JOBS, namespace, name)
        if job is not None and job["metadata"]["uid"] == uid:
            self._take_finalizers(job, {"orphan"})

    def _take_finalizers(self, job: Json, names: Iterable[str]) -> None:
        left = [each for each in job["metadata"].get("finalizers", []) if each not in names]
        self.store.replace(JOBS, {**job, "metadata": {**job["metadata"], "finalizers": left}})

    # -- changes -------------------------------------------------------------------------------------------------------

    def _heard(self, change: Change) -> None:
        self.changed.notify_all()
        if change.resource is PODS:
            if change.old is None and change.new is not None:
                self.runtime.added(change.new)
            elif change.new is None and change.old is not None:
                self.runtime.removed(change.old)
        if change.resource in (PODS, QUOTAS):
            _quota.refresh(self.store, (change.new or change.old or {})["metadata"]["namespace"])
        if change.resource is PODS and change.new is None and change.old is not None:
            for owner in change.old["metadata"].get("ownerReferences", []):
                args = (owner["uid"], change.old["metadata"]["namespace"], owner["name"])
                finish = functools.partial(self._finish_delete, *args)
                self.timeline.after(self.delays.of(COLLECT), finish)
        if change.resource is JOBS and change.new is None and change.old is not None:
            uid = change.old["metadata"]["uid"]
            self.timeline.after(self.delays.of(COLLECT), lambda: self._collect_maps(uid))
        if change.resource is JOBS and change.new is not None:
            self._watch_ttl(change.new)

    def _watch_ttl(self, job: Json) -> None:
        seconds = job["spec"].get("ttlSecondsAfterFinished")
        if seconds is None or not _status.finished(job) or "deletionTimestamp" in job["metadata"]:
            return
        meta = job["metadata"]

        def expire() -> None:
            stored = self.store.find(JOBS, meta["namespace"], meta["name"])
            if stored is None or stored["metadata"]["uid"] != meta["uid"]:
                return
            ttl = stored["spec"].get("ttlSecondsAfterFinished")
            if ttl is not None and _status.finish_time(stored) + ttl <= self.timeline.now():
                self.delete_job(meta["namespace"], meta["name"], "Foreground")

        self.timeline.after(
            max(0.0, _status.finish_time(job) + seconds - self.timeline.now()), expire
        )

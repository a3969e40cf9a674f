"""The cluster: the store, the clock, and the runtime of the pods."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

from ..._server import _timeline
from .._admission import _quota
from .._objects._resources import (
    JOBS,
    KUEUE,
    KUEUE_VERSIONS,
    NAMESPACES,
    NODES,
    PODS,
    QUOTAS,
    SERVICE_ACCOUNTS,
)
from .._objects._store import Change, Store
from .._pods import _facts, _states
from ._delays import Delay, Delays
from ._events import Recorder
from ._runtime import Runtime

Json = dict[str, Any]

# A pod stays visible for a moment after its last delete is written: 4 of 30 were seen so.
LAST_DELETE = Delay(0.0, 0.0, 0.4)
UNSCHEDULED_SECONDS = 20.0  # from the delete of a pod that never had a node until it is made Failed


class Cluster:
    """The state that the API, the controllers and the pods share.

    ``changed`` is the lock that guards all of it. The cluster knows none of them: a controller (of
    Jobs, Kueue) is made with the cluster and listens to the changes of its store, and the part that
    runs the pods sets itself as its ``runtime``.
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
        self.admission: Callable[[Json], Json] = lambda job: job  # a webhook's change to new Jobs
        # Versions of API groups that are not installed.
        self.absent = {f"{KUEUE}/{version}" for version in KUEUE_VERSIONS}
        self.lost: set[str] = set()  # nodes whose kubelet does not answer
        self.runtime: Runtime
        self.node_found: Callable[[str], None] = lambda _: None  # called when it answers again
        self.store.listeners.append(self._heard)
        with self.changed:
            for name in ("default", "kube-system"):
                self.add_namespace({"metadata": {"name": name}})
            for node in nodes:
                self.add_node(node)

    def add_node(self, body: Json) -> None:
        """Add a node, whose kubelet answers."""
        self.lost.discard(body["metadata"]["name"])
        self.store.add(NODES, self.store.prepare(NODES, body))

    def add_namespace(self, body: Json) -> Json:
        """Add a namespace with its default service account."""
        name = body["metadata"]["name"]
        labels = {"kubernetes.io/metadata.name": name, **(body["metadata"].get("labels") or {})}
        meta = {**body["metadata"], "labels": labels}
        state = {"spec": {"finalizers": ["kubernetes"]}, "status": {"phase": "Active"}}
        new = {**body, "metadata": meta, **state}
        made = self.store.add(NAMESPACES, self.store.prepare(NAMESPACES, new))
        account = {"metadata": {"name": "default", "namespace": name}}
        self.store.add(SERVICE_ACCOUNTS, self.store.prepare(SERVICE_ACCOUNTS, account))
        return made

    def is_terminating(self, name: str) -> bool:
        """Return whether a namespace is being deleted: no object can be made in it any more."""
        namespace = self.store.find(NAMESPACES, "", name)
        return namespace is not None and "deletionTimestamp" in namespace["metadata"]

    def job(self, namespace: str, name: str) -> Json:
        """Return the Job as stored, which must not be changed.

        Raises:
            LookupError: there is no such Job.
        """
        with self.changed:
            job = self.store.find(JOBS, namespace, name)
        if job is None:
            raise LookupError(f"there is no Job {namespace}/{name}")
        return job

    # -- pods
    # ----------------------------------------------------------------------------------------------

    def pod(self, meta: Json) -> Json | None:
        """Return the pod of this name if its uid is still the same; None otherwise."""
        pod = self.store.find(PODS, meta["namespace"], meta["name"])
        return pod if pod is not None and pod["metadata"]["uid"] == meta["uid"] else None

    def pods_of(self, namespace: str, job: str | None) -> list[Json]:
        """Return the pods of a Job by name, or all pods, by index and then age."""
        with self.changed:
            listed = self.store.by_age(PODS, namespace)
        label = "batch.kubernetes.io/job-name"
        if job is not None:
            listed = [pod for pod in listed if pod["metadata"].get("labels", {}).get(label) == job]
        return sorted(listed, key=lambda pod: _facts.index_of(pod) or 0)

    def put_pod(self, pod: Json) -> None:
        """Store a pod that a pure function made from the stored one."""
        self.store.replace(
            PODS,
            {
                **pod,
            },
        )

    def out_of_reach(self, pod: Json) -> bool:
        """Return whether the pod's node is lost."""
        return pod["spec"].get("nodeName") in self.lost

    def disrupt(self, pod: Json, reason: str, message: str, grace: int | None = None) -> None:
        """Mark a pod with DisruptionTarget, and delete it."""
        self.put_pod(_states.disrupted(pod, reason, message, self.timeline.stamp()))
        self.delete_pod(pod["metadata"]["namespace"], pod["metadata"]["name"], grace)

    def release(self, pod: Json) -> None:
        """Take the Job controller's finalizer off a pod."""
        stored = self.pod(pod["metadata"])
        if stored is None or not _facts.tracked(stored):
            return
        meta = dict(stored["metadata"])
        meta["finalizers"] = [item for item in meta["finalizers"] if item != _facts.TRACKING]
        if not meta["finalizers"]:
            del meta["finalizers"]
        self.store.replace(PODS, {**stored, "metadata": meta})

    def delete_pod(self, namespace: str, name: str, grace: int | None = None) -> Json | None:
        """Delete a pod, as the API does.

        Args:
            namespace: the namespace of the pod.
            name: the name of the pod.
            grace: the seconds that it may take; None for its own ``terminationGracePeriodSeconds``.

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
        stored = self.pod(pod["metadata"])
        if stored is not None and not _facts.ended(stored):
            self.put_pod(_states.with_status(stored, phase="Failed"))

    def gone(self, pod: Json) -> None:
        """Take out a deleted pod that the kubelet is done with, as soon as no finalizer holds it.

        As observed, the kubelet's last delete writes the time of the deletion anew, a second after
        the end, with no grace.
        """
        meta = pod["metadata"]
        stored = self.pod(meta)
        if stored is None or not _facts.deleting(stored):
            return
        ends = [end.get("finishedAt") for end in _facts.terminations(stored)]
        moments = [_timeline.seconds(end) + 1.0 for end in ends if end]
        last = _timeline.stamp(max([self.timeline.now(), *moments]))
        times = {"deletionTimestamp": last, "deletionGracePeriodSeconds": 0}
        self.store.replace(PODS, {**stored, "metadata": {**stored["metadata"], **times}}, keep=True)
        self.soon(LAST_DELETE, lambda: self._take_out(meta))

    def _take_out(self, meta: Json) -> None:
        stored = self.pod(meta)
        if stored is not None:
            self.put_pod(stored)

    def soon(self, delay: Delay, action: Callable[[], None]) -> None:
        """Do something after a delay, at once if it is 0."""
        seconds = self.delays.of(delay)
        if seconds:
            self.timeline.after(seconds, action)
        else:
            action()

    # -- jobs
    # ----------------------------------------------------------------------------------------------

    def delete_job(self, namespace: str, name: str, policy: str) -> Json:
        """Delete a Job.

        Args:
            namespace: the namespace of the Job.
            name: the name of the Job.
            policy: ``Background``, ``Foreground`` or ``Orphan``.

        Returns:
            The Job in its last state.
        """
        job = self.store.get(JOBS, namespace, name)
        finalizer = {"Foreground": ["foregroundDeletion"], "Orphan": ["orphan"]}.get(policy, [])
        finalizers = [*job["metadata"].get("finalizers", []), *finalizer]
        if "deletionTimestamp" in job["metadata"]:
            return job
        if not finalizers:
            self.store.remove(JOBS, namespace, name)
            return job
        times = {"deletionTimestamp": self.timeline.stamp(), "deletionGracePeriodSeconds": 0}
        meta = {**job["metadata"], **times, "finalizers": finalizers}
        self.store.replace(JOBS, {**job, "metadata": meta})
        return self.store.get(JOBS, namespace, name)

    # -- changes
    # ----------------------------------------------------------------------------------------------

    def _heard(self, change: Change) -> None:
        self.changed.notify_all()
        if change.resource is PODS:
            if change.old is None and change.new is not None:
                self.runtime.added(change.new)
            elif change.new is None and change.old is not None:
                self.runtime.removed(change.old)
        if change.resource in (PODS, QUOTAS):
            _quota.refresh(self.store, (change.new or change.old or {})["metadata"]["namespace"])

"""The part of Kueue that a launcher sees: queued Jobs are suspended until they are admitted."""

from __future__ import annotations

import copy
import functools
from typing import Any

from .._jobs import _status
from .._jobs._new_pod import owner
from .._objects._resources import JOBS, KUEUE, LOCAL_QUEUES, WORKLOADS
from .._objects._store import Change
from ._cluster import Cluster

Json = dict[str, Any]

QUEUE = "kueue.x-k8s.io/queue-name"
JOB_UID = "kueue.x-k8s.io/job-uid"
LOOK_SECONDS = 0.1


class Kueue:
    """Keeps a Workload for every Job with a queue label.

    All methods run under the cluster's lock.
    """

    def __init__(self, cluster: Cluster, version: str) -> None:
        self._cluster = cluster
        self._workloads = WORKLOADS[version]
        self._queues = LOCAL_QUEUES[version]
        cluster.absent.discard(f"{KUEUE}/{version}")
        self._store = cluster.store
        cluster.store.listeners.append(self._heard)
        cluster.admission = suspend_queued

    def add_queue(self, name: str, namespace: str) -> None:
        """Add a LocalQueue."""
        body = {
            "metadata": {"name": name, "namespace": namespace},
            "spec": {"clusterQueue": "cluster"},
        }
        self._store.add(self._queues, self._store.prepare(self._queues, body))

    def admit(self, job: Json) -> None:
        """Admit a Job, as when there is room for it.

        Raises:
            LookupError: it is not queued.
        """
        workload = self._workload(job)
        if workload is None or not workload["spec"]["active"]:
            raise LookupError(
                f"Job {job['metadata']['name']} has no active Workload: it needs the label "
                f"{QUEUE}, and a moment"
            )
        conditions = {kind: ("True", kind) for kind in ("QuotaReserved", "Admitted")}
        if _status.true_condition(workload["status"], "Evicted"):
            conditions["Evicted"] = ("False", "QuotaReserved")
        self._put(workload, **conditions)

    def preempt(self, job: Json) -> None:
        """Take a Job's room for another one; it is queued again.

        Raises:
            LookupError: it is not admitted.
        """
        workload = self._workload(job)
        if workload is None or not _status.true_condition(workload["status"], "Admitted"):
            raise LookupError(f"Job {job['metadata']['name']} is not admitted")
        self._evict(workload, "Preempted")

    def _heard(self, change: Change) -> None:
        obj = change.new or change.old
        if obj is None or change.resource not in (JOBS, self._workloads):
            return
        meta = obj["metadata"]
        names = [owner["name"] for owner in meta.get("ownerReferences", [])]
        for name in [meta["name"]] if change.resource is JOBS else names:
            look = functools.partial(self._look, meta["namespace"], name)
            self._cluster.timeline.after(LOOK_SECONDS, look)
        if change.resource is JOBS and change.new is None:
            for workload in self._owned(meta["uid"]):
                self._store.remove(self._workloads, meta["namespace"], workload["metadata"]["name"])

    def _look(self, namespace: str, name: str) -> None:
        job = self._store.find(JOBS, namespace, name)
        if job is None or not is_queued(job) or "deletionTimestamp" in job["metadata"]:
            return
        workload = self._workload(job)
        if workload is None:
            if not _status.finished(job):
                new = self._store.prepare(self._workloads, self._made_for(job))
                self._store.add(self._workloads, new)
            return
        status = workload["status"]
        if _status.finished(job):
            if not _status.true_condition(status, "Finished"):
                self._put(workload, Finished=("True", "JobFinished"))
            return
        if not workload["spec"]["active"] and not _status.true_condition(status, "Evicted"):
            self._evict(workload, "Deactivated")
        # Kueue overrules any other client that sets suspend, both ways.
        admitted = _status.true_condition(status, "Admitted") and workload["spec"]["active"]
        if bool(job["spec"].get("suspend")) == bool(admitted):
            spec = {**job["spec"], "suspend": not admitted}
            self._store.replace(JOBS, {**job, "spec": spec})

    def _made_for(self, job: Json) -> Json:
        meta, spec = job["metadata"], job["spec"]
        pods = {"name": "main", "count": spec["parallelism"], "template": spec["template"]}
        return {
            "metadata": {
                "name": f"job-{meta['name']}-{self._store.suffix()}",
                "namespace": meta["namespace"],
                "labels": {JOB_UID: meta["uid"]},
                "ownerReferences": [owner(job)],
            },
            "spec": {"active": True, "queueName": meta["labels"][QUEUE], "podSets": [pods]},
            "status": {"conditions": []},
        }

    def _evict(self, workload: Json, reason: str) -> None:
        gone = {"QuotaReserved": ("False", "Pending"), "Admitted": ("False", "NoReservation")}
        if not _status.true_condition(workload["status"], "Admitted"):
            gone = {}
        self._put(workload, Evicted=("True", reason), **gone)

    def _put(self, workload: Json, **wanted: tuple[str, str]) -> None:
        """Set conditions of a Workload: to a status, for a reason."""
        status = copy.deepcopy(workload["status"])
        for kind, (value, reason) in wanted.items():
            _status.set_condition(status, kind, value, reason, reason, self._cluster.timeline.now())
        self._store.replace(self._workloads, {**workload, "status": status})

    def _owned(self, uid: str) -> list[Json]:
        owned = list(self._store.owned(uid))
        return [obj for kind, obj in owned if kind == self._workloads.qualified]

    def _workload(self, job: Json) -> Json | None:
        return next(iter(self._owned(job["metadata"]["uid"])), None)


def is_queued(job: Json) -> bool:
    """Return whether a Job has a queue."""
    return QUEUE in (job["metadata"].get("labels") or {})


def suspend_queued(job: Json) -> Json:
    """Return a new Job as the webhook changes it: suspended if it is queued."""
    return {**job, "spec": {**(job.get("spec") or {}), "suspend": True}} if is_queued(job) else job

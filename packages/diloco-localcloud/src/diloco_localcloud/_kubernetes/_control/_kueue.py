"""The part of Kueue that a launcher sees: queued Jobs are suspended until they are admitted."""

from __future__ import annotations

from typing import Any

from .._jobs import _status
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
        new = self._conditions(
            workload, QuotaReserved=("True", "QuotaReserved"), Admitted=("True", "Admitted")
        )
        if _status.true_condition(workload["status"], "Evicted"):
            new = self._conditions(new, Evicted=("False", "QuotaReserved"))
        self._store.replace(self._workloads, new)

    def preempt(self, job: Json) -> None:
        """Take a Job's room for another one; it is queued again.

        Raises:
            LookupError: it is not admitted.
        """
        workload = self._workload(job)
        if workload is None or not _status.true_condition(workload["status"], "Admitted"):
            raise LookupError(f"Job {job['metadata']['name']} is not admitted")
        self._store.replace(self._workloads, self._evicted(workload, "Preempted"))

    def _heard(self, change: Change) -> None:
        obj = change.new or change.old
        if obj is None or change.resource not in (JOBS, self._workloads):
            return
        meta = obj["metadata"]
        if change.resource is JOBS:
            self._cluster.timeline.after(
                LOOK_SECONDS, lambda: self._look(meta["namespace"], meta["name"])
            )
        for owner in meta.get("ownerReferences", []) if change.resource is self._workloads else ():
            self._cluster.timeline.after(
                LOOK_SECONDS,
                lambda name=owner["name"]: self._look(meta["namespace"], name),  # type: ignore[misc]
            )
        if change.resource is JOBS and change.new is None:
            for _, workload in list(self._owned(meta["uid"])):
                self._store.remove(self._workloads, meta["namespace"], workload["metadata"]["name"])

    def _look(self, namespace: str, name: str) -> None:
        job = self._store.find(JOBS, namespace, name)
        if job is None or not is_queued(job) or "deletionTimestamp" in job["metadata"]:
            return
        workload = self._workload(job)
        if _status.finished(job):
            if workload is not None and not _status.true_condition(workload["status"], "Finished"):
                self._store.replace(
                    self._workloads, self._conditions(workload, Finished=("True", "JobFinished"))
                )
            return
        if workload is None:
            self._store.add(
                self._workloads, self._store.prepare(self._workloads, self._made_for(job))
            )
            return
        if not workload["spec"]["active"]:
            if not _status.true_condition(workload["status"], "Evicted"):
                self._store.replace(self._workloads, self._evicted(workload, "Deactivated"))
            self._suspend(job, suspend=True)
            return
        # Kueue overrules any other client that sets suspend, both ways.
        self._suspend(job, suspend=not _status.true_condition(workload["status"], "Admitted"))

    def _suspend(self, job: Json, *, suspend: bool) -> None:
        if bool(job["spec"].get("suspend")) != suspend:
            self._store.replace(
                JOBS,
                {
                    **job,
                    "metadata": dict(job["metadata"]),
                    "spec": {**job["spec"], "suspend": suspend},
                },
            )

    def _made_for(self, job: Json) -> Json:
        meta = job["metadata"]
        owner = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "name": meta["name"],
            "uid": meta["uid"],
            "controller": True,
        }
        return {
            "metadata": {
                "name": f"job-{meta['name']}-{self._store.suffix()}",
                "namespace": meta["namespace"],
                "labels": {JOB_UID: meta["uid"]},
                "ownerReferences": [owner],
            },
            "spec": {
                "active": True,
                "queueName": meta["labels"][QUEUE],
                "podSets": [
                    {
                        "name": "main",
                        "count": job["spec"]["parallelism"],
                        "template": job["spec"]["template"],
                    }
                ],
            },
            "status": {"conditions": []},
        }

    def _evicted(self, workload: Json, reason: str) -> Json:
        gone = {"QuotaReserved": ("False", "Pending"), "Admitted": ("False", "NoReservation")}
        if not _status.true_condition(workload["status"], "Admitted"):
            gone = {}
        return self._conditions(workload, Evicted=("True", reason), **gone)

    def _conditions(self, workload: Json, **wanted: tuple[str, str]) -> Json:
        status = {
            **workload["status"],
            "conditions": list(workload["status"].get("conditions", [])),
        }
        for kind, (value, reason) in wanted.items():
            _status.set_condition(status, kind, value, reason, reason, self._cluster.timeline.now())
        return {**workload, "metadata": dict(workload["metadata"]), "status": status}

    def _owned(self, uid: str) -> list[tuple[str, Json]]:
        return [
            (kind, obj) for kind, obj in self._store.owned(uid) if kind.startswith("workloads.")
        ]

    def _workload(self, job: Json) -> Json | None:
        return next((obj for _, obj in self._owned(job["metadata"]["uid"])), None)


def is_queued(job: Json) -> bool:
    """Return whether a Job has a queue."""
    return QUEUE in (job["metadata"].get("labels") or {})


def suspend_queued(job: Json) -> Json:
    """Return a new Job as the webhook changes it: suspended if it is queued."""
    return {**job, "spec": {**(job.get("spec") or {}), "suspend": True}} if is_queued(job) else job

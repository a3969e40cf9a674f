"""The Job controller: does what the plan says when a Job or its pods have changed.

It looks with the delays of the real one.
"""

from __future__ import annotations

from typing import Any

from .._admission import _admit
from .._jobs import _new_pod, _plan, _status
from .._jobs._backoff import FIRST_SECONDS, Backoff
from .._objects._refusals import ApiError
from .._objects._resources import JOBS, PODS
from .._objects._store import Change
from ._cluster import Cluster
from ._delays import Delay

Json = dict[str, Any]
Key = tuple[str, str]

NEW_JOB = Delay(0.1, 0.02, 0.5)  # from a create to the first look
BATCH = Delay(1.0, 0.5, 1.2)  # from a change of a pod to the look that takes all changes together
FLUSH = Delay(0.02, 0.0, 0.3)  # between the write of the uncounted pods and the write of the counts
MAX_PER_LOOK = 500
SOURCE = "job-controller"


class JobController:
    """Looks after the Jobs of a cluster. All methods run under the cluster's lock.

    Attributes:
        backoff_seconds: the first wait before a failed pod is replaced.
        batch_seconds: from the change of a pod to the next look at its Job.
    """

    def __init__(self, cluster: Cluster, *, backoff_seconds: float = FIRST_SECONDS) -> None:
        self._cluster = cluster
        self.backoff_seconds = backoff_seconds
        self.batch_seconds = BATCH.usual
        self._due: dict[Key, float] = {}
        self._records: dict[str, Backoff] = {}
        self._busy: set[Key] = set()
        cluster.store.listeners.append(self._heard)

    def poke(self, key: Key, seconds: float) -> None:
        """Look at a Job ``seconds`` from now, unless a look is due before that."""
        moment = self._cluster.timeline.now() + seconds
        if self._due.get(key, moment + 1) <= moment:
            return
        self._due[key] = moment

        def look() -> None:
            if self._due.get(key) == moment:
                del self._due[key]
                self._look(key)

        self._cluster.timeline.after(seconds, look)

    def _delay(self, delay: Delay) -> float:
        return self._cluster.delays.of(delay)

    def _heard(self, change: Change) -> None:
        obj = change.new or change.old
        if obj is None:
            return
        meta = obj["metadata"]
        if change.resource is JOBS and change.new is not None:
            old = change.old or {}
            if change.old is None:
                self.poke((meta["namespace"], meta["name"]), self._delay(NEW_JOB))
            elif old["spec"] != obj["spec"] or "deletionTimestamp" in meta:
                self.poke((meta["namespace"], meta["name"]), 0.01)
        elif change.resource is PODS:
            for owner in meta.get("ownerReferences", []):
                if owner["kind"] == "Job":
                    batch = BATCH._replace(usual=self.batch_seconds)
                    self.poke((meta["namespace"], owner["name"]), self._delay(batch))

    def _look(self, key: Key) -> None:
        store, now = self._cluster.store, self._cluster.timeline.now()
        job = store.find(JOBS, *key)
        if job is None or _status.finished(job):
            return
        if key in self._busy:
            self.poke(key, FLUSH.usual)
            return
        uid = job["metadata"]["uid"]
        pods = [pod for kind, pod in store.owned(uid) if kind == "pods"]
        plan = _plan.plan(job, pods, self._records.get(uid, Backoff()), now, self.backoff_seconds)
        if plan.status is None:
            return
        create, rest = plan.create[:MAX_PER_LOOK], plan.create[MAX_PER_LOOK:]
        if rest:
            plan.status["active"] = plan.status.get("active", 0) - len(rest)
            self.poke(key, self.batch_seconds)
        made = self._create(job, create)
        if made < len(create):  # pods were refused: they are not active, and are tried again
            plan.status["active"] = plan.status.get("active", 0) - len(create) + made
            if plan.status["active"] <= 0:
                del plan.status["active"]
            self.poke(key, 10.0)
        for pod in plan.drop:
            self._cluster.release(pod)
        for pod in [*plan.drop, *plan.delete]:
            self._cluster.delete_pod(pod["metadata"]["namespace"], pod["metadata"]["name"])
            self._say(job, "SuccessfulDelete", f"Deleted pod: {pod['metadata']['name']}")
        self._records[uid] = plan.backoff
        if plan.again is not None:
            self.poke(key, plan.again)
        self._busy.add(key)
        # The pods are made before the status counts them.
        self._cluster.timeline.after(
            self._delay(FLUSH) if create else 0.0, lambda: self._told(key, uid, plan)
        )

    def _told(self, key: Key, uid: str, plan: _plan.Plan) -> None:
        self._write(key, uid, plan.status or {})
        if plan.release or plan.ending:
            self._cluster.timeline.after(self._delay(FLUSH), lambda: self._count(key, uid, plan))
        else:
            self._busy.discard(key)

    def _count(self, key: Key, uid: str, plan: _plan.Plan) -> None:
        self._busy.discard(key)
        for pod in plan.release:
            self._cluster.release(pod)
        job = self._cluster.store.find(JOBS, *key)
        if job is None or job["metadata"]["uid"] != uid:
            return
        released = {pod["metadata"]["uid"] for pod in plan.release}
        status = _status.settle(job["status"], released, plan.ending, self._cluster.timeline.now())
        self._write(key, uid, status)
        job = self._cluster.store.find(JOBS, *key)
        if job is not None and plan.ending is not None and _status.finished(job):
            good = plan.ending["type"] == "Complete"
            why = plan.ending["reason"], plan.ending["message"]
            words = ("Completed", "Job completed") if good else why
            self._say(job, *words, warning=not good)

    def _create(self, job: Json, wanted: list[tuple[int | None, dict[str, str]]]) -> int:
        store = self._cluster.store
        if self._cluster.is_terminating(job["metadata"]["namespace"]):
            return 0  # creates are refused there, and no event can be written there either
        for made, (index, notes) in enumerate(wanted):
            new = store.prepare(PODS, _new_pod.from_job(job, index, store.suffix(), notes))
            try:
                pod = store.add(PODS, _admit.admit(store, new))
            except ApiError as refusal:
                self._say(job, "FailedCreate", f"Error creating: {refusal}", warning=True)
                return made
            self._say(job, "SuccessfulCreate", f"Created pod: {pod['metadata']['name']}")
        return len(wanted)

    def _write(self, key: Key, uid: str, status: Json) -> None:
        job = self._cluster.store.find(JOBS, *key)
        if job is not None and job["metadata"]["uid"] == uid:
            self._cluster.store.replace(JOBS, {**job, "status": status})

    def _say(self, job: Json, reason: str, message: str, *, warning: bool = False) -> None:
        self._cluster.events.say(job, reason, message, source=SOURCE, warning=warning)

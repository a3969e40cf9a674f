"""The state of every rank, derived from a Job and its pods.

The derivation is a pure function, so that every observer reports the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from diloco_protocol import Reason, ReplicaState, ReplicaStatus

from ._cause import clock, why_deleting, why_gone
from ._ends import Ends
from ._facts import JobFacts, PodFacts, pods_by_index
from ._observation import Observation, began, evidence, in_order, keep_told_to_end
from ._verdict import judge, native, taken_away

PENDING, RUNNING = ReplicaState.PENDING, ReplicaState.RUNNING

_IMAGE = frozenset(
    {
        "ErrImagePull",
        "ImagePullBackOff",
        "InvalidImageName",
        "ErrImageNeverPull",
        "ImageInspectError",
        "RegistryUnavailable",
        "SignatureValidationFailed",
    }
)


def map_states(
    job: JobFacts,
    pods: list[PodFacts],
    indexes: Iterable[int],
    seen: Mapping[int, Observation] | None = None,
) -> dict[int, tuple[ReplicaStatus, Observation]]:
    """Return the status of some indexes, and what to remember of each.

    The Job's lists decide which indexes have succeeded or failed. A pod that has ended and is in
    neither list has not been counted yet (this takes seconds). All other indexes end with the Job,
    and only when it says that no pod is left.

    Args:
        job: The Job, read before the pods.
        pods: All pods of the Job.
        indexes: The indexes that are asked for.
        seen: What was seen of the indexes before.
    """
    known = seen or {}
    by_index = {
        index: [*rest, keep_told_to_end(newest, known.get(index))]
        for index, (*rest, newest) in pods_by_index(pods).items()
    }
    ends = Ends(job, by_index, known)
    view = _View(job, ends, live=any(pod.live for pod in pods))
    statuses = {}
    for index in indexes:
        before = known.get(index)
        index_pods = by_index.get(index, [])
        status = in_order(view.status(index, index_pods, before), before)
        pod = evidence(index_pods[-1] if index_pods else None, before, job)
        last = Observation(status.state, status.attempt, podless=not index_pods, pod=pod)
        statuses[index] = (status, last)
    return statuses


class _View:
    """One look at a run."""

    def __init__(self, job: JobFacts, ends: Ends, *, live: bool) -> None:
        self.job = job
        self.ends = ends
        self.live = live

    def status(self, index: int, pods: list[PodFacts], before: Observation | None) -> ReplicaStatus:
        """Return the status of one index; its pods are given with the newest last."""
        job = self.job
        newest = pods[-1] if pods else None
        if index in job.completed:
            return self.ends.succeeded(pods, before)
        if index in job.failed:
            return self.ends.failed(pods, before)
        if job.finished or (job.cancelled and job.suspended and job.idle and not self.live):
            return self.ends.ended_with_the_job(newest, before)
        if newest is None:
            return self._without_pod(before)
        return self._alive(newest, before)

    def _without_pod(self, before: Observation | None) -> ReplicaStatus:
        job = self.job
        words = native(job, None)
        if job.decided or job.deleting or (job.cancelled and not job.suspended):
            # Pods that are ended may disappear before the Job says that it is over.
            reason, message = self._why_stopping()
            state = PENDING if job.idle and not job.decided else RUNNING
            if before is not None and not before.state.terminal:
                state = before.state
            return ReplicaStatus(
                state,
                reason=reason,
                stopping=True,
                message=message,
                started_at=began(before) if state is RUNNING else None,
                native=words,
            )
        if job.suspended or "Suspended" in job.conditions:
            reason = Reason.CANCEL_REQUESTED if job.cancelled else Reason.QUEUED
            text = self._why_suspended()
            return ReplicaStatus(
                PENDING, reason=reason, stopping=job.cancelled, message=text, native=words
            )
        if before is not None and before.state is RUNNING and not before.podless:
            # The Job was read before the pods, so it may have counted this pod by now. The next
            # look will show that.
            text = why_gone(before.pod) or "its pod is gone"
            text += "; whether it is replaced is not known yet"
            return ReplicaStatus(RUNNING, message=text, started_at=began(before), native=words)
        reason = Reason.PREEMPTED if before is not None and before.attempt > 1 else Reason.STARTING
        if before is not None and before.state is RUNNING:
            reason = Reason.PREEMPTED
        gone = why_gone(before.pod) if before is not None else ""
        text = f"{gone}; there is no pod for it yet" if gone else "there is no pod for it yet"
        if job.parallelism < job.completions:
            text += f": the Job's spec.parallelism was set to {job.parallelism}"
        return ReplicaStatus(PENDING, reason=reason, message=text, native=words)

    def _alive(self, pod: PodFacts, before: Observation | None) -> ReplicaStatus:
        job = self.job
        reason, message = self._why_stopping()
        if pod.deleting and not message:
            is_suspended = "Suspended" in job.conditions
            message = self._why_suspended() if is_suspended else why_deleting(pod)
        stopping = pod.deleting or job.decided or job.deleting or job.cancelled
        attempt, state = pod.attempt, RUNNING
        started = pod.started_at
        running_before = before is not None and before.state is RUNNING
        if pod.never_ran and stopping and not running_before:
            state = PENDING
        elif pod.phase in {"Succeeded", "Failed"} or pod.terminated is not None:
            if pod.disrupted and not stopping and pod.phase == "Failed":
                attempt, state, reason, started = attempt + 1, PENDING, Reason.PREEMPTED, None
                message = f"its pod was taken away ({taken_away(pod)}); it will be started again"
            elif not stopping:
                message = f"{judge(pod).message}; the cluster has not counted it yet"
        elif not pod.running and (pod.phase == "Pending" or pod.waiting is not None):
            state = PENDING
            if not stopping:
                reason, message = _why_pending(pod)
        return ReplicaStatus(
            state,
            attempt=attempt,
            reason=reason,
            stopping=stopping,
            message=message,
            started_at=started,
            native=native(job, pod),
        )

    def _why_suspended(self) -> str:
        condition = self.job.conditions.get("Suspended")
        since = "" if condition is None or condition.time is None else clock(condition.time)
        text = "the Job is suspended" + (f" since {since}" if since else "")
        if self.job.queue:
            return f"{text} (Kueue's queue {self.job.queue})"
        return f"{text}: by hand, or by something other than Kueue; spec.suspend=false resumes it"

    def _why_stopping(self) -> tuple[Reason | None, str]:
        job = self.job
        if job.cancelled:
            return Reason.CANCEL_REQUESTED, "the run is being cancelled"
        if job.deleting:
            return None, "the Job is being deleted"
        condition = job.conditions.get("FailureTarget")
        if condition is not None:
            return None, f"the run is being ended: {condition.message or condition.reason}"
        return None, ""


def _why_pending(pod: PodFacts) -> tuple[Reason, str]:
    if pod.blocked is not None:
        reason = Reason.QUEUED if pod.blocked[0] == "SchedulingGated" else Reason.UNSCHEDULABLE
        return reason, pod.blocked[1] or pod.blocked[0]
    if pod.waiting is not None:
        reason = Reason.IMAGE if pod.waiting[0] in _IMAGE else Reason.STARTING
        return reason, ": ".join(text for text in pod.waiting if text)
    return Reason.STARTING, ""

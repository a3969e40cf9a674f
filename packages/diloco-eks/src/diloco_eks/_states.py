"""From a Job and its pods to the state of every rank: a pure function, so that every observer reports the same."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from diloco_protocol import Reason, ReplicaState, ReplicaStatus

from ._arguments import map_name
from ._departure import clock, why_going, why_gone
from ._facts import JobFacts, PodFacts, pods_by_index
from ._indexes import compress_ranks
from ._own_end import own_end, uncounted_success
from ._verdict import Verdict, interrupted, judge, taken_away
from ._whose_end import deleted_by_others, ended_by_itself

PENDING, RUNNING = ReplicaState.PENDING, ReplicaState.RUNNING
SUCCEEDED, FAILED, CANCELLED = ReplicaState.SUCCEEDED, ReplicaState.FAILED, ReplicaState.CANCELLED

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


@dataclass(frozen=True, slots=True)
class Seen:
    """What an observer saw of a replica the last time; it keeps one observer's reports in order, and states are right without it.

    Attributes:
        state: Its state.
        attempt: Its attempt.
        podless: It had no pod.
        pod: Its newest pod. Pods that are ended before the cluster has counted them vanish with all that they said.
    """

    state: ReplicaState
    attempt: int
    podless: bool = False
    pod: PodFacts | None = None


def map_states(
    job: JobFacts,
    pods: list[PodFacts],
    indexes: Iterable[int],
    seen: Mapping[int, Seen] | None = None,
) -> dict[int, tuple[ReplicaStatus, Seen]]:
    """The status of some indexes, and what to remember of it.

    The Job's lists decide what has succeeded or failed; a pod that has ended and is in neither is not counted yet (this
    takes seconds). Everyone else ends with the Job, and only when it says that no pod is left.

    Args:
        job: The Job, read before the pods.
        pods: All its pods.
        indexes: Those asked for.
        seen: What was seen of them before.
    """
    known = seen or {}
    by_index = {
        index: [*rest, _told_first(newest, known.get(index))]
        for index, (*rest, newest) in pods_by_index(pods).items()
    }
    view = _View(job, by_index, known, any(pod.live for pod in pods))
    statuses = {}
    for index in indexes:
        before = known.get(index)
        index_pods = by_index.get(index, [])
        status = _in_order(view.status(index, index_pods, before), before)
        pod = _evidence(index_pods[-1] if index_pods else None, before, job)
        last = Seen(status.state, status.attempt, podless=not index_pods, pod=pod)
        statuses[index] = (status, last)
    return statuses


def _evidence(pod: PodFacts | None, before: Seen | None, job: JobFacts) -> PodFacts | None:
    """The pod to remember: as it is now, unless it had been seen to end by itself before it was told to."""
    last = None if before is None else before.pod
    if pod is None or last is None:
        return pod or last
    same = last.name == pod.name
    return last if same and ended_by_itself(last, job.decided_at) else pod


def _told_first(pod: PodFacts, before: Seen | None) -> PodFacts:
    """A pod that was told to end when it was first seen to be, whatever it says later."""
    last = None if before is None else before.pod
    if last is None or last.name != pod.name or last.told_to_end is None:
        return pod
    return replace(pod, told_to_end=last.told_to_end)


def _began(before: Seen | None) -> float | None:
    """When a replica started whose pod is gone, if that was seen."""
    return before.pod.started_at if before is not None and before.pod is not None else None


def _in_order(status: ReplicaStatus, before: Seen | None) -> ReplicaStatus:
    """An attempt never goes back, and a replica that was running waits only for its next one."""
    if before is None:
        return status
    least = before.attempt
    if before.state is RUNNING and status.state is PENDING:
        least += 1
    return status if status.attempt >= least else replace(status, attempt=least)


class _View:
    """One look at a run."""

    def __init__(
        self,
        job: JobFacts,
        by_index: Mapping[int, list[PodFacts]],
        seen: Mapping[int, Seen],
        live: bool,
    ) -> None:
        self.job = job
        self.by_index = by_index
        self.seen = seen
        self.live = live
        self._culprits: str | None = None

    def status(self, index: int, pods: list[PodFacts], before: Seen | None) -> ReplicaStatus:
        """The status of one index; its pods are given with the newest last."""
        job = self.job
        newest = pods[-1] if pods else None
        if index in job.completed:
            return self._succeeded(pods, before)
        if index in job.failed:
            return self._failed(pods, before)
        if job.finished or (job.cancelled and job.suspended and job.idle and not self.live):
            return self._ended_with_the_job(newest, before)
        if newest is None:
            return self._without_pod(before)
        return self._alive(newest, before)

    # --- terminal ---

    def _succeeded(self, pods: list[PodFacts], before: Seen | None) -> ReplicaStatus:
        pod = next((pod for pod in reversed(pods) if pod.phase == "Succeeded"), None)
        last = before.pod if pod is None and before else pod
        if last is not None and interrupted(last):
            if last.disrupted:
                return self._from_verdict(judge(last), last)
            if deleted_by_others(last, self.job.decided_at):
                return self._deleted(last)
        verdict = None if pod is None else judge(pod)
        return ReplicaStatus(
            SUCCEEDED,
            attempt=1 if pod is None else pod.attempt,
            reason=Reason.COMPLETED,
            exit_code=0,
            started_at=None if verdict is None else verdict.started_at,
            finished_at=None if verdict is None else verdict.finished_at,
            native=_native_end(pod),
        )

    def _failed(self, pods: list[PodFacts], before: Seen | None) -> ReplicaStatus:
        pod = next((pod for pod in reversed(pods) if pod.phase == "Failed"), None) or (
            pods[-1] if pods else None
        )
        last = before.pod if pod is None and before is not None else pod
        if last is not None and last.failures >= self.job.restarts:
            if deleted_by_others(last, self.job.decided_at, counted=True):
                return self._deleted(last)
            if last.terminated is not None:
                return self._from_verdict(judge(last), last)
        if pod is not None:
            return self._from_verdict(judge(pod), pod)
        gone = why_gone(last) or "its pod has been removed"
        return ReplicaStatus(
            FAILED,
            attempt=1 + self.job.restarts,
            reason=Reason.PLATFORM,
            message=f"the Job counts it as failed; {gone}, so neither exit code nor message are "
            "known",
            native=_native_end(None),
        )

    def _deleted(self, pod: PodFacts) -> ReplicaStatus:
        """The end of a replica whose pod somebody deleted, which is no failure of its own."""
        code = (pod.terminated or {}).get("exitCode")
        how = "how its program ended is not known" if code is None else f"its exit code was {code}"
        return ReplicaStatus(
            FAILED,
            attempt=pod.attempt,
            reason=Reason.PLATFORM,
            message=f"{why_gone(pod)}; {how}",
            started_at=pod.started_at,
            finished_at=pod.finished_at,
            native=_native_end(pod),
        )

    def _from_verdict(self, verdict: Verdict, pod: PodFacts) -> ReplicaStatus:
        return ReplicaStatus(
            FAILED,
            attempt=pod.attempt,
            reason=verdict.reason,
            exit_code=verdict.exit_code,
            signal=verdict.signal,
            message=verdict.message,
            started_at=verdict.started_at,
            finished_at=verdict.finished_at,
            native=_native_end(pod),
        )

    def _ended_with_the_job(self, pod: PodFacts | None, before: Seen | None) -> ReplicaStatus:
        job = self.job
        last = _evidence(pod, before, job)
        own_failure = (
            pod is not None
            and pod.phase == "Failed"
            and not (pod.deleting or pod.disrupted)
            and pod.failures >= job.restarts
            and (pod.terminated is None or ended_by_itself(pod, job.decided_at))
        )
        if pod is not None and own_failure:
            return self._from_verdict(judge(pod), pod)
        condition = job.conditions.get("Failed")
        state = FAILED
        if job.cancelled and "Complete" not in job.conditions:
            state, reason, message = CANCELLED, Reason.CANCEL_REQUESTED, "the run was cancelled"
        elif condition is None:
            reason, message = (
                Reason.PLATFORM,
                "the Job is complete, but does not list this index as succeeded",
            )
        elif condition.reason == "DeadlineExceeded":
            reason = Reason.TIMEOUT
            message = f"the Job passed its deadline of {job.deadline} s, which counts the wait for nodes and images too"
        elif job.failed or condition.reason in {
            "BackoffLimitExceeded",
            "PodFailurePolicy",
            "MaxFailedIndexesExceeded",
        }:
            own = own_end(last, job)
            if last is not None and own is not None:
                return self._from_verdict(own, last)
            if last is not None and deleted_by_others(last, job.decided_at):
                return self._deleted(last)
            reason, message = Reason.GANG_FAILED, self._gang_message(condition.message)
        else:
            reason, message = Reason.PLATFORM, condition.message or condition.reason
        end = condition or job.conditions.get("Complete")
        return ReplicaStatus(
            state,
            attempt=1 if pod is None else pod.attempt,
            reason=reason,
            message=message + uncounted_success(last, job),
            finished_at=None if end is None else end.time,
            native=self._native(pod),
        )

    def _gang_message(self, native: str) -> str:
        """Who failed, for the messages of those that were ended because of it."""
        if self._culprits is None:
            job = self.job
            text = native
            if job.failed:
                first = min(job.failed)
                why = self._failed(self.by_index.get(first, []), self.seen.get(first)).message
                text = f"rank {job.first_rank + first} failed"
                if len(job.failed) > 1:
                    ranks = compress_ranks(job.first_rank + index for index in job.failed)
                    text = f"ranks {ranks} failed; rank {job.first_rank + first}"
                text += f": {why}" if why else ""
            self._culprits = f"the run was ended because {text}"
        return self._culprits

    # --- not terminal ---

    def _without_pod(self, before: Seen | None) -> ReplicaStatus:
        job = self.job
        native = self._native(None)
        if job.decided or job.deleting or (job.cancelled and not job.suspended):
            # Pods that are ended may vanish before the Job says that it is over.
            reason, message = self._why_stopping()
            state = PENDING if job.idle and not job.decided else RUNNING
            if before is not None and not before.state.terminal:
                state = before.state
            return ReplicaStatus(
                state,
                reason=reason,
                stopping=True,
                message=message,
                started_at=_began(before) if state is RUNNING else None,
                native=native,
            )
        if job.suspended or "Suspended" in job.conditions:
            reason = Reason.CANCEL_REQUESTED if job.cancelled else Reason.QUEUED
            text = self._why_suspended()
            return ReplicaStatus(
                PENDING, reason=reason, stopping=job.cancelled, message=text, native=native
            )
        if before is not None and before.state is RUNNING and not before.podless:
            # The Job was read before the pods: it may have counted this pod by now. The next look knows.
            text = why_gone(before.pod) or "its pod is gone"
            text += "; whether it is replaced is not known yet"
            return ReplicaStatus(RUNNING, message=text, started_at=_began(before), native=native)
        reason = Reason.PREEMPTED if before is not None and before.attempt > 1 else Reason.STARTING
        if before is not None and before.state is RUNNING:
            reason = Reason.PREEMPTED
        gone = why_gone(before.pod) if before is not None else ""
        text = f"{gone}; there is no pod for it yet" if gone else "there is no pod for it yet"
        return ReplicaStatus(PENDING, reason=reason, message=text, native=native)

    def _alive(self, pod: PodFacts, before: Seen | None) -> ReplicaStatus:
        job = self.job
        reason, message = self._why_stopping()
        if pod.deleting and not message:
            held = "Suspended" in job.conditions
            message = self._why_suspended() if held else why_going(pod)
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
                if f'configmap "{map_name(job.name)}' in message:
                    message += (
                        "; the launch was interrupted before it had sent its arguments: launch again "
                        f"with run_id={job.name!r} and the same arguments, or cancel_run({job.name!r})"
                    )
        return ReplicaStatus(
            state,
            attempt=attempt,
            reason=reason,
            stopping=stopping,
            message=message,
            started_at=started,
            native=self._native(pod),
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

    def _native(self, pod: PodFacts | None) -> str:
        job = self.job
        decided = next(
            (
                c
                for c in ("Failed", "Complete", "FailureTarget", "Suspended")
                if c in job.conditions
            ),
            "active",
        )
        condition = job.conditions.get(decided)
        text = f"Job {decided}" + (f" ({condition.reason})" if condition is not None else "")
        return f"{text}; {_native_end(pod)}"


def _native_end(pod: PodFacts | None) -> str:
    if pod is None:
        return "no pod"
    word = pod.terminated.get("reason") if pod.terminated is not None else (pod.waiting or ("",))[0]
    return f"pod {pod.name} {pod.phase}" + (f" ({word})" if word else "")


def _why_pending(pod: PodFacts) -> tuple[Reason, str]:
    if pod.blocked is not None:
        reason = Reason.QUEUED if pod.blocked[0] == "SchedulingGated" else Reason.UNSCHEDULABLE
        return reason, pod.blocked[1] or pod.blocked[0]
    if pod.waiting is not None:
        reason = Reason.IMAGE if pod.waiting[0] in _IMAGE else Reason.STARTING
        return reason, ": ".join(text for text in pod.waiting if text)
    return Reason.STARTING, ""

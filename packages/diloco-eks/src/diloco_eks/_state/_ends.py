"""The ends of ranks: of those that the Job lists, and of all others once the Job is over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace

from diloco_protocol import Reason, ReplicaState, ReplicaStatus

from ._cause import deleted_by_others, ended_by_itself, why_gone
from ._facts import JobFacts, PodFacts
from ._observation import Observation, evidence
from ._verdict import Verdict, hides_failure, judge, native, native_end, read_message


class Ends:
    """The ends of one run, as one look has found them.

    Args:
        job: The Job.
        by_index: The pods of every index, the newest last.
        seen: What was seen of the indexes earlier.
    """

    def __init__(
        self, job: JobFacts, by_index: Mapping[int, list[PodFacts]], seen: Mapping[int, Observation]
    ) -> None:
        self.job = job
        self.by_index = by_index
        self.seen = seen
        self._culprits: str | None = None

    def succeeded(self, pods: list[PodFacts], before: Observation | None) -> ReplicaStatus:
        """Return the status of an index that the Job lists as completed."""
        pod = next((pod for pod in reversed(pods) if pod.phase == "Succeeded"), None)
        last = before.pod if pod is None and before else pod
        if last is not None and hides_failure(last):
            if deleted_by_others(last, self.job.decided_at):
                return self._deleted(last)
            if last.disrupted or read_message(last) is not None:
                return self._judged(last)
        verdict = None if pod is None else judge(pod)
        return ReplicaStatus(
            ReplicaState.SUCCEEDED,
            attempt=1 if pod is None else pod.attempt,
            reason=Reason.COMPLETED,
            exit_code=0,
            started_at=None if verdict is None else verdict.started_at,
            finished_at=None if verdict is None else verdict.finished_at,
            native=native_end(pod),
        )

    def failed(self, pods: list[PodFacts], before: Observation | None) -> ReplicaStatus:
        """Return the status of an index that the Job lists as failed."""
        last = _last_seen(pods, before)
        if last is not None and self._is_deleted(last):
            return self._deleted(last)
        final = last is not None and last.failures >= self.job.restarts
        if last is not None and (pods or (final and last.terminated is not None)):
            return self._judged(last)
        gone = why_gone(last) or "its pod has been removed"
        return ReplicaStatus(
            ReplicaState.FAILED,
            attempt=1 + self.job.restarts,
            reason=Reason.PLATFORM,
            message=f"the Job counts it as failed; {gone}, so neither exit code nor message are "
            "known",
            native=native_end(None),
        )

    def _is_deleted(self, pod: PodFacts) -> bool:
        """Return whether the last pod of an index that the Job lists as failed was deleted."""
        final = pod.failures >= self.job.restarts
        return final and deleted_by_others(pod, self.job.decided_at, counted=True)

    def _deleted(self, pod: PodFacts) -> ReplicaStatus:
        """Return the end of a replica whose pod was deleted, which is not a failure of its own."""
        code = (pod.terminated or {}).get("exitCode")
        how = "how its program ended is not known" if code is None else f"its exit code was {code}"
        text, times = f"{why_gone(pod)}; {how}", (pod.started_at, pod.finished_at)
        return self._judged(pod, Verdict(Reason.PLATFORM, None, None, text, *times))

    def _judged(self, pod: PodFacts, verdict: Verdict | None = None) -> ReplicaStatus:
        end = asdict(verdict or judge(pod))
        return ReplicaStatus(
            ReplicaState.FAILED, attempt=pod.attempt, native=native_end(pod), **end
        )

    def ended_with_the_job(self, pod: PodFacts | None, before: Observation | None) -> ReplicaStatus:
        """Return the status of an index that the Job does not list, once the Job is over."""
        job = self.job
        last = evidence(pod, before, job)
        own_failure = (
            pod is not None
            and pod.phase == "Failed"
            and not (pod.deleting or pod.disrupted)
            and pod.failures >= job.restarts
            and (pod.terminated is None or ended_by_itself(pod, job.decided_at))
        )
        if pod is not None and own_failure:
            return self._judged(pod)
        condition = job.conditions.get("Failed")
        state = ReplicaState.FAILED
        if job.cancelled and "Complete" not in job.conditions:
            state, reason = ReplicaState.CANCELLED, Reason.CANCEL_REQUESTED
            message = "the run was cancelled"
        elif condition is None:
            reason = Reason.PLATFORM
            message = "the Job is complete, but does not list this index as succeeded"
        elif condition.reason == "DeadlineExceeded":
            reason = Reason.TIMEOUT
            message = (
                f"the Job passed its deadline of {job.deadline} s, which counts the wait for nodes "
                "and images too"
            )
        elif job.failed or condition.reason in {
            "BackoffLimitExceeded",
            "PodFailurePolicy",
            "MaxFailedIndexesExceeded",
        }:
            verdict = uncounted_failure(last, job)
            if last is not None and verdict is not None:
                return self._judged(last, verdict)
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
            message=message,
            finished_at=None if end is None else end.time,
            native=native(job, pod),
        )

    def _gang_message(self, native: str) -> str:
        """Return who failed, for the messages of the ranks that were ended because of it."""
        if self._culprits is None:
            job, text = self.job, native
            if job.culprit is not None:
                pods, before = self.by_index.get(job.culprit, []), self.seen.get(job.culprit)
                others = f" (and {len(job.failed) - 1} more)" if len(job.failed) > 1 else ""
                why = self.failed(pods, before).message
                text = f"rank {job.first_rank + job.culprit} failed{others}"
                text += f": {why}" if why else ""
            self._culprits = f"the run was ended because {text}"
        return self._culprits


def _last_seen(pods: list[PodFacts], before: Observation | None) -> PodFacts | None:
    """Return the pod of an index that the Job lists as failed, or what was last seen of it."""
    if pods:
        return next((pod for pod in reversed(pods) if pod.phase == "Failed"), pods[-1])
    return None if before is None else before.pod


def uncounted_failure(pod: PodFacts | None, job: JobFacts) -> Verdict | None:
    """Return a replica's own failure, which the controller did not count.

    The controller was ending the run already.

    Args:
        pod: The replica's last pod, as it was last seen.
        job: The replica's Job, which has failed.

    Returns:
        The failure, or None if the replica had not failed by itself, or if that is not known.
    """
    if pod is None or pod.disrupted:
        return None
    verdict = judge(pod) if pod.terminated is not None else None
    if verdict is not None and verdict.reason is Reason.TIMEOUT:
        return verdict
    started, decided = pod.started_at, job.decided_at
    if ended_by_itself(pod, decided) and verdict is not None:
        return verdict if verdict.exit_code else None
    if job.timeout is None or started is None or decided is None:
        return None
    base = verdict or Verdict(Reason.TIMEOUT, None, None, "", started, decided)
    ended = decided if base.finished_at is None else min(decided, base.finished_at)
    if started + job.timeout > ended:
        return None
    message = (
        f"it ran for longer than its timeout of {job.timeout:g} s; the end of another rank came "
        "before its own was counted"
    )
    return replace(base, reason=Reason.TIMEOUT, message=message)

"""The last observation of a replica, and what follows from it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from diloco_protocol import ReplicaState, ReplicaStatus

from ._cause import ended_by_itself
from ._facts import JobFacts, PodFacts


@dataclass(frozen=True, slots=True)
class Observation:
    """A record of what an observer last saw of a replica.

    It keeps one observer's reports in order; states are right without it.

    Attributes:
        state: Its state.
        attempt: Its attempt.
        podless: It had no pod.
        pod: Its newest pod. Pods that are ended before the cluster has counted them disappear with
            all their information.
    """

    state: ReplicaState
    attempt: int
    podless: bool = False
    pod: PodFacts | None = None


def evidence(pod: PodFacts | None, before: Observation | None, job: JobFacts) -> PodFacts | None:
    """Return the pod to remember.

    It is the pod as it is now, unless it was seen to end by itself before it was told to.
    """
    last = None if before is None else before.pod
    if pod is None or last is None:
        return pod or last
    same = last.name == pod.name
    return last if same and ended_by_itself(last, job.decided_at) else pod


def keep_told_to_end(pod: PodFacts, before: Observation | None) -> PodFacts:
    """Return a pod with the time when it was first seen to be told to end."""
    last = None if before is None else before.pod
    if last is None or last.name != pod.name or last.told_to_end is None:
        return pod
    return replace(pod, told_to_end=last.told_to_end)


def began(before: Observation | None) -> float | None:
    """Return when a replica whose pod is gone had started, if that was seen."""
    return before.pod.started_at if before is not None and before.pod is not None else None


def in_order(status: ReplicaStatus, before: Observation | None) -> ReplicaStatus:
    """Return a status whose attempt is not lower than before.

    A replica that was running can only be pending for its next attempt.
    """
    if before is None:
        return status
    least = before.attempt
    if before.state is ReplicaState.RUNNING and status.state is ReplicaState.PENDING:
        least += 1
    return status if status.attempt >= least else replace(status, attempt=least)

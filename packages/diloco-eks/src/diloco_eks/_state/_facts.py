"""The facts of a Job and a pod: only those from which states are derived.

``_reading.py`` makes them from their JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

_LIVE = frozenset({"Pending", "Running", "Unknown"})
_LATEST = 253_402_300_799  # the end of the year 9999, which calendars and journals can represent


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition that is true: its reason, message and time (Unix seconds)."""

    reason: str
    message: str
    time: float | None


@dataclass(frozen=True, slots=True)
class JobFacts:
    """The facts of a Job.

    Attributes:
        name: Its name.
        uid: The uid of this very object.
        version: Its resourceVersion.
        created: When it was created, in Unix seconds.
        completions: Number of indexes.
        parallelism: How many pods may run at a time.
        completed: Indexes that have succeeded.
        failed: Indexes that have failed for good.
        conditions: The conditions that are true, by type.
        suspended: Its suspension was requested, and the controller has acknowledged it.
        cancelled: It has our mark of a cancel.
        deleting: It is being deleted.
        idle: The controller counts no pod, neither active nor terminating.
        restarts: Number of restarts per index.
        deadline: Its deadline in seconds, if there is one.
        timeout: Seconds for which an attempt may run, if there is a limit.
        first_rank: Rank of index 0.
        world_size: The run's number of replicas.
        run_id: Name of the run; empty if diloco did not launch the Job.
        fingerprint: The launch's fingerprint.
        queue: Name of Kueue's queue, if it is in one.
    """

    name: str
    uid: str
    version: str
    created: float
    completions: int
    parallelism: int
    completed: frozenset[int]
    failed: frozenset[int]
    conditions: Mapping[str, Condition]
    suspended: bool
    cancelled: bool
    deleting: bool
    idle: bool
    restarts: int
    deadline: int | None
    timeout: float | None
    first_rank: int
    world_size: int
    run_id: str
    fingerprint: str
    queue: str | None

    @property
    def ranks(self) -> range:
        """Return the ranks of the replicas."""
        return range(self.first_rank, self.first_rank + self.completions)

    @property
    def culprit(self) -> int | None:
        """Return the failed index that messages of other ranks name; None if none has failed."""
        return min(self.failed, default=None)

    @property
    def finished(self) -> bool:
        """Return whether the Job has ended and all its pods with it."""
        return "Complete" in self.conditions or "Failed" in self.conditions

    @property
    def decided_at(self) -> float | None:
        """Return when it was decided that the Job has failed, in Unix seconds, if it was."""
        condition = self.conditions.get("FailureTarget") or self.conditions.get("Failed")
        return None if condition is None else condition.time

    @property
    def decided(self) -> bool:
        """Return whether the end of the Job is certain; its pods may still be ending."""
        return (
            self.finished
            or "FailureTarget" in self.conditions
            or "SuccessCriteriaMet" in self.conditions
        )


@dataclass(frozen=True, slots=True)
class PodFacts:
    """The facts of a pod.

    Attributes:
        name: Its name.
        uid: Its uid.
        index: Its completion index; -1 if it has none.
        created: When it was created, in Unix seconds.
        attempt: Which attempt of the index it is, from 1.
        failures: Earlier failures of the index that counted.
        phase: Pending, Running, Succeeded, Failed or Unknown.
        deleting: It is being deleted.
        node: Name of its node; empty while it has none.
        unready_since: Since when it has not been ready, in Unix seconds; None if it is ready.
        told_to_end: When it was told to end, in Unix seconds; None if it was not.
        disruption: Which part of the platform took it away, if that was not its own Job: the
            eviction API, the taint manager, the scheduler, a node.
        reason: The pod's own reason, such as Evicted.
        message: The pod's own message.
        blocked: Why it is not on a node: reason and message.
        waiting: Why its containers do not run: reason and message.
        running: Our container runs.
        running_since: Start of our container in Unix seconds, while it runs.
        terminated: The end of our container, as the kubelet reports it.
    """

    name: str
    uid: str
    index: int
    created: float
    attempt: int
    failures: int
    phase: str
    deleting: bool
    node: str
    unready_since: float | None
    told_to_end: float | None
    disruption: Condition | None
    reason: str
    message: str
    blocked: tuple[str, str] | None
    waiting: tuple[str, str] | None
    running: bool
    running_since: float | None
    terminated: Mapping[str, Any] | None

    @property
    def live(self) -> bool:
        """Return whether the pod may still hold resources."""
        return self.phase in _LIVE

    @property
    def is_last(self) -> bool:
        """Return whether its index can have no later pod, whatever the cluster's clocks say.

        A pod is replaced only once it has failed or is being deleted.
        """
        return (self.live or self.phase == "Succeeded") and not self.deleting

    @property
    def over(self) -> bool:
        """Return whether the pod's container has ended, or never will run."""
        return not self.live or self.terminated is not None

    @property
    def started_at(self) -> float | None:
        """Return when the pod's container started, in Unix seconds; None if it has not."""
        return self.running_since or parse_time((self.terminated or {}).get("startedAt"))

    @property
    def unreachable(self) -> bool:
        """Return whether the pod was told to end and its node does not answer.

        As far as is known, its container is still running.
        """
        taken = self.disruption is not None and self.disruption.reason == "DeletionByTaintManager"
        return taken and self.deleting and self.running and self.unready_since is not None

    @property
    def finished_at(self) -> float | None:
        """Return when the pod's container ended, in Unix seconds; None if it has not."""
        return parse_time((self.terminated or {}).get("finishedAt"))

    @property
    def never_ran(self) -> bool:
        """Return whether the pod's container was never created.

        When such a pod is deleted, the kubelet reports an end of a container that never existed.
        """
        end = self.terminated or {}
        unknown = end.get("reason") == "ContainerStatusUnknown" and not end.get("startedAt")
        return unknown and "used to be Running" not in str(end.get("message"))

    @property
    def disrupted(self) -> bool:
        """Return whether the pod's node or the scheduler took it away."""
        return self.disruption is not None


def pods_by_index(pods: list[PodFacts]) -> dict[int, list[PodFacts]]:
    """Return the pods of every index, the newest last."""
    by_index: dict[int, list[PodFacts]] = {}
    for pod in sorted(
        pods, key=lambda pod: (pod.is_last, pod.created, pod.attempt, not pod.deleting, pod.name)
    ):
        by_index.setdefault(pod.index, []).append(pod)
    return by_index


def log_is_gone(name: str, pods: list[PodFacts]) -> bool:
    """Return whether the cluster says that a pod's log is gone.

    The log goes with the pod, or with its container, which goes before the pod.
    """
    return all(pod.over and (pod.deleting or pod.disrupted) for pod in pods if pod.name == name)


def parse_time(text: object) -> float | None:
    """Return an RFC 3339 time from 1970 to 9999 in Unix seconds; None for anything else."""
    if not isinstance(text, str):
        return None
    try:
        return sound_time(datetime.fromisoformat(text).timestamp())
    except (ValueError, OverflowError):
        return None


def sound_time(seconds: float) -> float | None:
    """Return a time that calendars and journals can represent; None for any other."""
    return seconds if 0 <= seconds <= _LATEST else None

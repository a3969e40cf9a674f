"""What a Job and a pod say of themselves: only what the states are made of.

``_reading.py`` makes it of their JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

_LIVE = frozenset({"Pending", "Running", "Unknown"})
_LATEST = 253_402_300_799  # the end of the year 9999: what calendars and journals can say


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition that is true: its reason, message and time (Unix seconds)."""

    reason: str
    message: str
    time: float | None


@dataclass(frozen=True, slots=True)
class JobFacts:
    """What a Job says.

    Attributes:
        name: Its name.
        uid: The uid of this very object.
        version: Its resourceVersion.
        created: Unix seconds.
        completions: Number of indexes.
        completed: Indexes that have succeeded.
        failed: Indexes that have failed for good.
        conditions: Those that are true, by type.
        suspended: Asked to be, and acknowledged.
        cancelled: It carries our mark.
        deleting: It is being deleted.
        idle: The controller counts no pod, neither active nor terminating.
        restarts: Restarts per index.
        deadline: Seconds, if there is one.
        timeout: Seconds for which an attempt may run, if there is a limit.
        first_rank: Rank of index 0.
        world_size: The run's number of replicas.
        run_id: The run; empty if diloco did not launch the Job.
        fingerprint: The launch's fingerprint.
        queue: Kueue's queue, if it is in one.
    """

    name: str
    uid: str
    version: str
    created: float
    completions: int
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
    def culprit(self) -> int | None:
        """Of those that have failed, the index that is named to the others."""
        return min(self.failed, default=None)

    @property
    def finished(self) -> bool:
        """Whether it has ended and all its pods with it."""
        return "Complete" in self.conditions or "Failed" in self.conditions

    @property
    def decided_at(self) -> float | None:
        """When it was decided that it has failed, in Unix seconds, if it was."""
        condition = self.conditions.get("FailureTarget") or self.conditions.get("Failed")
        return None if condition is None else condition.time

    @property
    def decided(self) -> bool:
        """Whether its end is certain; its pods may still be ending."""
        return (
            self.finished
            or "FailureTarget" in self.conditions
            or "SuccessCriteriaMet" in self.conditions
        )


@dataclass(frozen=True, slots=True)
class PodFacts:
    """What a pod says.

    Attributes:
        name: Its name.
        uid: Its uid.
        index: Its completion index; -1 if it has none.
        created: Unix seconds.
        attempt: The index's n-th life, from 1.
        failures: Earlier failures of the index that counted.
        phase: Pending, Running, Succeeded, Failed or Unknown.
        deleting: It is being deleted.
        node: Its node; empty while it has none.
        unready_since: Since when it has not been ready, in Unix seconds, if it is not.
        told_to_end: When it was told to go, in Unix seconds, if it was.
        disruption: Who took it away, if it was not its own Job: the eviction API, the taint
            manager, the scheduler, a node.
        reason: The pod's own reason, such as Evicted.
        message: The pod's own message.
        blocked: Why it is not on a node: reason and message.
        waiting: Why its containers do not run: reason and message.
        running: Our container runs.
        running_since: Its start in Unix seconds, while it runs.
        terminated: The end of our container, as the kubelet tells it.
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
        """Whether it may still hold resources."""
        return self.phase in _LIVE

    @property
    def over(self) -> bool:
        """Whether its container has ended, or never will run."""
        return not self.live or self.terminated is not None

    @property
    def started_at(self) -> float | None:
        """When its container started, in Unix seconds, if it has."""
        return self.running_since or parse_time((self.terminated or {}).get("startedAt"))

    @property
    def unreachable(self) -> bool:
        """Whether it was told to go, and its node does not answer: its container runs on, as far as anybody knows."""
        taken = self.disruption is not None and self.disruption.reason == "DeletionByTaintManager"
        return taken and self.deleting and self.running and self.unready_since is not None

    @property
    def finished_at(self) -> float | None:
        """When its container ended, in Unix seconds, if it has."""
        return parse_time((self.terminated or {}).get("finishedAt"))

    @property
    def never_ran(self) -> bool:
        """Whether its container was never made: the kubelet ends it on paper when such a pod is deleted."""
        end = self.terminated or {}
        unknown = end.get("reason") == "ContainerStatusUnknown" and not end.get("startedAt")
        return unknown and "used to be Running" not in str(end.get("message"))

    @property
    def disrupted(self) -> bool:
        """Whether its node or the scheduler took it away."""
        return self.disruption is not None


def pods_by_index(pods: list[PodFacts]) -> dict[int, list[PodFacts]]:
    """The pods of every index, the newest last."""
    by_index: dict[int, list[PodFacts]] = {}
    for pod in sorted(pods, key=lambda pod: (pod.created, pod.attempt, not pod.deleting, pod.name)):
        by_index.setdefault(pod.index, []).append(pod)
    return by_index


def log_is_gone(name: str, pods: list[PodFacts]) -> bool:
    """Whether the cluster says that a pod's log is gone: with the pod, or with its container, which goes before that."""
    return all(pod.over and (pod.deleting or pod.disrupted) for pod in pods if pod.name == name)


def parse_time(text: object) -> float | None:
    """An RFC 3339 time from 1970 to 9999, in Unix seconds; None for anything else."""
    if not isinstance(text, str):
        return None
    try:
        return sound_time(datetime.fromisoformat(text).timestamp())
    except (ValueError, OverflowError):
        return None


def sound_time(seconds: float) -> float | None:
    """A time that calendars and journals can say; None for any other."""
    return seconds if 0 <= seconds <= _LATEST else None

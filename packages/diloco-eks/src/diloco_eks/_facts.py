"""What a Job and a pod say of themselves, read from their JSON: only what the states are made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from . import _names as names
from ._indexes import expand_indexes

_LIVE = frozenset({"Pending", "Running", "Unknown"})


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
        first_rank: Rank of index 0.
        world_size: The run's number of replicas.
        run_id: The run; empty if diloco did not launch the Job.
        fingerprint: The launch's fingerprint.
        queue: Kueue's queue, if it is in one.
    """

    name: str
    uid: str
    version: str
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
    first_rank: int
    world_size: int
    run_id: str
    fingerprint: str
    queue: str | None

    @property
    def finished(self) -> bool:
        """Whether it has ended and all its pods with it."""
        return "Complete" in self.conditions or "Failed" in self.conditions

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
        index: Its completion index; -1 if it has none.
        created: Unix seconds.
        attempt: The index's n-th life, from 1.
        failures: Earlier failures of the index that counted.
        phase: Pending, Running, Succeeded, Failed or Unknown.
        deleting: It is being deleted.
        disrupted: Its node or the scheduler took it away.
        reason: The pod's own reason, such as Evicted.
        message: The pod's own message.
        blocked: Why it is not on a node: reason and message.
        waiting: Why its containers do not run: reason and message.
        running: Our container runs.
        running_since: Its start in Unix seconds, while it runs.
        terminated: The end of our container, as the kubelet tells it.
    """

    name: str
    index: int
    created: float
    attempt: int
    failures: int
    phase: str
    deleting: bool
    disrupted: bool
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


def read_job(job: Mapping[str, Any]) -> JobFacts:
    """The facts of a Job.

    Raises:
        BackendError: Its lists of indexes make no sense.
    """
    metadata, spec, status = (_mapping(job.get(part)) for part in ("metadata", "spec", "status"))
    labels, annotations = _mapping(metadata.get("labels")), _mapping(metadata.get("annotations"))
    completions = _count(spec.get("completions"))
    conditions = _conditions(status)
    return JobFacts(
        name=_text(metadata.get("name")),
        uid=_text(metadata.get("uid")),
        version=_text(metadata.get("resourceVersion")),
        completions=completions,
        completed=expand_indexes(_text(status.get("completedIndexes")), completions),
        failed=expand_indexes(_text(status.get("failedIndexes")), completions),
        conditions=conditions,
        suspended=spec.get("suspend") is True and "Suspended" in conditions,
        cancelled=names.CANCELLED in annotations,
        deleting=bool(metadata.get("deletionTimestamp")),
        idle=not _count(status.get("active")) and not _count(status.get("terminating")),
        restarts=_count(spec.get("backoffLimitPerIndex")),
        deadline=_count(spec.get("activeDeadlineSeconds")) or None,
        first_rank=_number(annotations.get(names.FIRST_RANK)),
        world_size=_number(annotations.get(names.WORLD_SIZE)),
        run_id=_text(labels.get(names.RUN)),
        fingerprint=_text(annotations.get(names.FINGERPRINT)),
        queue=_text(labels.get(names.QUEUE)) or None,
    )


def read_pod(pod: Mapping[str, Any]) -> PodFacts:
    """The facts of a pod."""
    metadata, status = _mapping(pod.get("metadata")), _mapping(pod.get("status"))
    labels, annotations = _mapping(metadata.get("labels")), _mapping(metadata.get("annotations"))
    index = labels.get(names.INDEX, annotations.get(names.INDEX))
    failures = _number(annotations.get(names.FAILURES))
    conditions = _items(status.get("conditions"))
    ours: Mapping[str, Any] = {}
    waiting: tuple[str, str] | None = None
    for container in (
        *_items(status.get("initContainerStatuses")),
        *_items(status.get("containerStatuses")),
    ):
        state = _mapping(container.get("state"))
        if container.get("name") == names.CONTAINER:
            ours = state
        held = _mapping(state.get("waiting"))
        if held and (waiting is None or waiting[0] in {"PodInitializing", "ContainerCreating"}):
            waiting = (_text(held.get("reason")), _text(held.get("message")))
    blocked = None
    disrupted = False
    for condition in conditions:
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            blocked = (_text(condition.get("reason")), _text(condition.get("message")))
        disrupted |= (
            condition.get("type") == "DisruptionTarget" and condition.get("status") == "True"
        )
    return PodFacts(
        name=_text(metadata.get("name")),
        index=_number(index, -1),
        created=parse_time(metadata.get("creationTimestamp")) or 0.0,
        attempt=1 + failures + _number(annotations.get(names.IGNORED_FAILURES)),
        failures=failures,
        phase=_text(status.get("phase")),
        deleting=bool(metadata.get("deletionTimestamp")),
        disrupted=disrupted,
        reason=_text(status.get("reason")),
        message=_text(status.get("message")),
        blocked=blocked,
        waiting=waiting,
        running="running" in ours,
        running_since=parse_time(_mapping(ours.get("running")).get("startedAt")),
        terminated=_mapping(ours["terminated"]) if ours.get("terminated") else None,
    )


def pods_by_index(pods: list[PodFacts]) -> dict[int, list[PodFacts]]:
    """The pods of every index, the newest last."""
    by_index: dict[int, list[PodFacts]] = {}
    for pod in sorted(pods, key=lambda pod: (pod.created, pod.attempt, not pod.deleting, pod.name)):
        by_index.setdefault(pod.index, []).append(pod)
    return by_index


def parse_time(text: object) -> float | None:
    """An RFC 3339 time in Unix seconds; None for anything else."""
    if not isinstance(text, str):
        return None
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        return None


def _conditions(status: Mapping[str, Any]) -> dict[str, Condition]:
    return {
        _text(condition.get("type")): Condition(
            _text(condition.get("reason")),
            _text(condition.get("message")),
            parse_time(condition.get("lastTransitionTime")),
        )
        for condition in _items(status.get("conditions"))
        if condition.get("status") == "True"  # one that has become false stays in the list
    }


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _items(value: object) -> list[Mapping[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _count(value: object) -> int:
    return value if type(value) is int and value > 0 else 0


def _number(value: object, default: int = 0) -> int:
    if not isinstance(value, str) or len(value) > 9 or not (value.isascii() and value.isdecimal()):
        return default
    return int(value)

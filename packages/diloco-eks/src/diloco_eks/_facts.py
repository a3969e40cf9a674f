"""What a Job and a pod say of themselves, read from their JSON: only what the states are made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from diloco_protocol import InvalidRequestError
from diloco_protocol.backend import read_whole, redact_and_cut

from . import _names as names
from ._indexes import expand_indexes

_MOST = 10**9
_SHOWN = 4096  # of a text for people
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
        disruption: Who took it away, if it was not its own Job: the eviction API, the taint manager, the scheduler, a node.
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

    def ended_by_itself(self, decided: float | None) -> bool:
        """Whether its container had ended before anybody told it to.

        Args:
            decided: When the end of its Job was decided, if it was. Later ranks fail because
                others have gone.
        """
        finished = self.finished_at
        if self.terminated is None or self.never_ran or self.disrupted:
            return False
        if not self.deleting:
            return decided is None or finished is None or finished <= decided
        times = [time for time in (self.told_to_end, decided) if time is not None]
        return finished is not None and bool(times) and finished < min(times)

    def deleted_by_others(self, decided: float | None) -> bool:
        """Whether somebody deleted it while it ran: not its node, nor its Job as that ended."""
        told = self.told_to_end
        first = told is not None and (decided is None or told < decided)
        return self.deleting and first and not self.disrupted and not self.ended_by_itself(decided)

    @property
    def never_ran(self) -> bool:
        """Whether its container was never made: the kubelet ends it on paper when such a pod is deleted."""
        end = self.terminated or {}
        unknown = end.get("reason") == "ContainerStatusUnknown" and not end.get("startedAt")
        return unknown and "used to be Running" not in _text(end.get("message"))

    @property
    def disrupted(self) -> bool:
        """Whether its node or the scheduler took it away."""
        return self.disruption is not None


def run_of(job: Mapping[str, Any]) -> str:
    """Return the run of a Job; empty if diloco did not launch it.

    Whoever may create Jobs may give them our labels: a run's Job has its name, and its ranks.
    """
    metadata = _mapping(job.get("metadata"))
    labels, annotations = _mapping(metadata.get("labels")), _mapping(metadata.get("annotations"))
    first = _number(annotations.get(names.FIRST_RANK))
    size = _number(annotations.get(names.WORLD_SIZE))
    count = _count(_mapping(job.get("spec")).get("completions"))
    named = metadata.get("name") == labels.get(names.RUN)
    ranked = first is not None and size is not None and 0 < count <= size - first
    ours = labels.get(names.MANAGED_BY) == names.MANAGER and named and ranked
    return _text(labels.get(names.RUN)) if ours else ""


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
        created=parse_time(metadata.get("creationTimestamp")) or 0.0,
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
        timeout=_seconds(annotations.get(names.TIMEOUT)),
        first_rank=_number(annotations.get(names.FIRST_RANK)) or 0,
        world_size=_number(annotations.get(names.WORLD_SIZE)) or 0,
        run_id=run_of(job),
        fingerprint=_text(annotations.get(names.FINGERPRINT)),
        queue=_text(labels.get(names.QUEUE)) or None,
    )


def read_pod(pod: Mapping[str, Any]) -> PodFacts:
    """The facts of a pod."""
    metadata, status = _mapping(pod.get("metadata")), _mapping(pod.get("status"))
    labels, annotations = _mapping(metadata.get("labels")), _mapping(metadata.get("annotations"))
    index = _number(labels.get(names.INDEX, annotations.get(names.INDEX)))
    failures, ignored = (
        _number(annotations.get(name)) or 0 for name in (names.FAILURES, names.IGNORED_FAILURES)
    )
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
            waiting = _why(held)
    why = _why(status)
    blocked = None
    unready_since = None
    for condition in _items(status.get("conditions")):
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            blocked = _why(condition)
        if condition.get("type") == "Ready" and condition.get("status") != "True":
            unready_since = parse_time(condition.get("lastTransitionTime"))
    return PodFacts(
        name=_text(metadata.get("name")),
        uid=_text(metadata.get("uid")),
        index=-1 if index is None else index,
        created=parse_time(metadata.get("creationTimestamp")) or 0.0,
        attempt=1 + failures + ignored,
        failures=failures,
        phase=_text(status.get("phase")),
        deleting=bool(metadata.get("deletionTimestamp")),
        node=_text(_mapping(pod.get("spec")).get("nodeName")),
        unready_since=unready_since,
        told_to_end=_told_to_end(metadata, ended=bool(ours.get("terminated"))),
        disruption=_conditions(status).get("DisruptionTarget"),
        reason=why[0],
        message=why[1],
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
        seconds = datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        return None
    return seconds if seconds >= 0 else None


def _conditions(status: Mapping[str, Any]) -> dict[str, Condition]:
    return {
        _text(condition.get("type")): Condition(
            *_why(condition),
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


def _why(value: Mapping[str, Any]) -> tuple[str, str]:
    """A reason and its message, which may be as long as somebody likes."""
    reason, message = (_text(value.get(key)) for key in ("reason", "message"))
    return reason[:_SHOWN], redact_and_cut(message, _SHOWN)


def _count(value: object) -> int:
    return value if type(value) is int and value > 0 else 0


def _told_to_end(metadata: Mapping[str, Any], *, ended: bool) -> float | None:
    """The deletionTimestamp is when the grace is over.

    Once the container has ended, the kubelet deletes the pod for good: with no grace, and a
    deletionTimestamp that says nothing of the first one.
    """
    over = parse_time(metadata.get("deletionTimestamp"))
    grace = metadata.get("deletionGracePeriodSeconds")
    if over is None or type(grace) is not int or (ended and grace == 0):
        return None
    return over - grace


def _seconds(value: object) -> float | None:
    try:
        seconds = float(_text(value))
    except ValueError:
        return None
    return seconds if seconds >= 0 else None  # and not NaN


def _number(value: object) -> int | None:
    try:
        return read_whole("a number", _text(value), 0, _MOST)
    except InvalidRequestError:
        return None

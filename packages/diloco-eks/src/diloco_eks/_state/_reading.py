"""Reads the facts of a Job and a pod from their JSON, which may contain anything."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diloco_protocol import InvalidRequestError
from diloco_protocol.backend import MAX_REPLICAS, is_run_id, read_whole, redact_and_cut

from .._request import _names as names
from ._facts import Condition, JobFacts, PodFacts, parse_time, sound_time
from ._indexes import expand_indexes

_MOST = 2**31 - 1  # the largest number that Kubernetes counts to
_SHOWN = 4096  # characters of a text for people
_REASON_SHOWN = 128  # characters; Kubernetes' own reasons are shorter
_END = ("exitCode", "signal", "reason", "message", "startedAt", "finishedAt")
_END_SHOWN = 12 * 1024  # of the end of a log; the kubelet keeps no more for a whole pod


def run_of(job: Mapping[str, Any]) -> str:
    """Return the run of a Job; empty if diloco did not launch it.

    Every account that may create Jobs may give them our labels, so the Job must also have the name
    and the ranks of its run.
    """
    metadata = mapping(job.get("metadata"))
    labels, annotations = mapping(metadata.get("labels")), mapping(metadata.get("annotations"))
    spec = mapping(job.get("spec"))
    first = _number(annotations.get(names.FIRST_RANK), MAX_REPLICAS)
    size = _number(annotations.get(names.WORLD_SIZE), MAX_REPLICAS)
    count = _count(spec.get("completions"))
    run_id = text_of(labels.get(names.RUN))
    named = metadata.get("name") == run_id and is_run_id(run_id)
    ranked = first is not None and size is not None and 0 < count <= size - first
    kind = spec.get("completionMode") == "Indexed"
    is_run = labels.get(names.MANAGED_BY) == names.MANAGER and named and ranked and kind
    return run_id if is_run else ""


def read_job(job: Mapping[str, Any]) -> JobFacts:
    """Return the facts of a Job.

    Raises:
        BackendError: The Job's lists of indexes make no sense.
    """
    metadata, spec, status = (mapping(job.get(part)) for part in ("metadata", "spec", "status"))
    labels, annotations = mapping(metadata.get("labels")), mapping(metadata.get("annotations"))
    completions = _count(spec.get("completions"))
    listed = status if 0 < completions <= MAX_REPLICAS else {}  # otherwise it is not our Job
    conditions = _conditions(status)
    return JobFacts(
        name=text_of(metadata.get("name")),
        uid=text_of(metadata.get("uid")),
        version=text_of(metadata.get("resourceVersion")),
        created=parse_time(metadata.get("creationTimestamp")) or 0.0,
        completions=completions,
        parallelism=_count(spec.get("parallelism", completions)),
        completed=expand_indexes(text_of(listed.get("completedIndexes")), completions),
        failed=expand_indexes(text_of(listed.get("failedIndexes")), completions),
        conditions=conditions,
        suspended=spec.get("suspend") is True and "Suspended" in conditions,
        cancelled=names.CANCELLED in annotations,
        deleting=bool(metadata.get("deletionTimestamp")),
        idle=not _count(status.get("active")) and not _count(status.get("terminating")),
        restarts=min(_count(spec.get("backoffLimitPerIndex")), _MOST - 1),  # attempts are 1 higher
        deadline=_count(spec.get("activeDeadlineSeconds")) or None,
        timeout=_seconds(annotations.get(names.TIMEOUT)),
        first_rank=_number(annotations.get(names.FIRST_RANK)) or 0,
        world_size=_number(annotations.get(names.WORLD_SIZE)) or 0,
        run_id=run_of(job),
        fingerprint=text_of(annotations.get(names.FINGERPRINT)),
        queue=text_of(labels.get(names.QUEUE)) or None,
    )


def read_pod(pod: Mapping[str, Any]) -> PodFacts:
    """Return the facts of a pod."""
    metadata, status = mapping(pod.get("metadata")), mapping(pod.get("status"))
    labels, annotations = mapping(metadata.get("labels")), mapping(metadata.get("annotations"))
    index = _number(labels.get(names.INDEX, annotations.get(names.INDEX)))
    failures, ignored = (
        _number(annotations.get(name)) or 0 for name in (names.FAILURES, names.IGNORED_FAILURES)
    )
    own_state: Mapping[str, Any] = {}
    waiting: tuple[str, str] | None = None
    for container in (
        *mappings(status.get("initContainerStatuses")),
        *mappings(status.get("containerStatuses")),
    ):
        state = mapping(container.get("state"))
        if container.get("name") == names.CONTAINER:
            own_state = state
        wait = mapping(state.get("waiting"))
        if wait and (waiting is None or waiting[0] in {"PodInitializing", "ContainerCreating"}):
            waiting = _why(wait)
    why = _why(status)
    blocked = None
    unready_since = None
    for condition in mappings(status.get("conditions")):
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            blocked = _why(condition)
        if condition.get("type") == "Ready" and condition.get("status") != "True":
            unready_since = parse_time(condition.get("lastTransitionTime"))
    return PodFacts(
        name=text_of(metadata.get("name")),
        uid=text_of(metadata.get("uid")),
        index=-1 if index is None else index,
        created=parse_time(metadata.get("creationTimestamp")) or 0.0,
        attempt=1 + failures + ignored,
        failures=failures,
        phase=text_of(status.get("phase")),
        deleting=bool(metadata.get("deletionTimestamp")),
        node=text_of(mapping(pod.get("spec")).get("nodeName")),
        unready_since=unready_since,
        told_to_end=_told_to_end(metadata, ended=bool(own_state.get("terminated"))),
        disruption=_conditions(status).get("DisruptionTarget"),
        reason=why[0],
        message=why[1],
        blocked=blocked,
        waiting=waiting,
        running="running" in own_state,
        running_since=parse_time(mapping(own_state.get("running")).get("startedAt")),
        terminated=_end(mapping(own_state["terminated"])) if own_state.get("terminated") else None,
    )


def _end(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of a container's end that are used.

    Every account that may create pods may write anything into it.
    """
    kept = {name: state.get(name) for name in _END}
    texts = {
        name: text[-_END_SHOWN:] if name == "message" else _within(text, _REASON_SHOWN)
        for name, text in kept.items()
        if isinstance(text, str)
    }
    return {name: code for name, code in kept.items() if type(code) is int} | texts


def _within(text: str, most: int) -> str:
    return text if len(text) <= most else redact_and_cut(text, most)


def _conditions(status: Mapping[str, Any]) -> dict[str, Condition]:
    return {
        text_of(condition.get("type")): Condition(
            *_why(condition), parse_time(condition.get("lastTransitionTime"))
        )
        for condition in mappings(status.get("conditions"))
        if condition.get("status") == "True"  # conditions that became false stay in the list
    }


def mapping(value: object) -> Mapping[str, Any]:
    """Return a member that has to be an object; an empty one if it is something else."""
    return value if isinstance(value, dict) else {}


def mappings(value: object) -> list[Mapping[str, Any]]:
    """Return the objects in a member that has to be a list of them."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def text_of(value: object) -> str:
    """Return the value if it is text; otherwise an empty text."""
    return value if isinstance(value, str) else ""


def _why(value: Mapping[str, Any]) -> tuple[str, str]:
    """Return a reason and its message, which may contain any text of any length."""
    reason, message = (text_of(value.get(key)) for key in ("reason", "message"))
    return redact_and_cut(reason, _REASON_SHOWN), redact_and_cut(message, _SHOWN)


def _count(value: object) -> int:
    return value if type(value) is int and 0 < value <= _MOST else 0


def _told_to_end(metadata: Mapping[str, Any], *, ended: bool) -> float | None:
    """Return when an object was told to end.

    The deletionTimestamp is the time at which its grace is over. Once the container has ended, the
    kubelet deletes the pod for good, without any grace; then the deletionTimestamp says nothing
    about the first one.
    """
    over = parse_time(metadata.get("deletionTimestamp"))
    grace = metadata.get("deletionGracePeriodSeconds")
    if over is None or type(grace) is not int or not 0 <= grace <= _MOST or (ended and grace == 0):
        return None
    return sound_time(over - grace)


def _seconds(value: object) -> float | None:
    try:
        seconds = float(text_of(value))
    except ValueError:
        return None
    return seconds if seconds >= 0 else None  # None for NaN too


def _number(value: object, most: int = 10**9) -> int | None:
    try:
        return read_whole("a number", text_of(value), 0, most)
    except InvalidRequestError:
        return None

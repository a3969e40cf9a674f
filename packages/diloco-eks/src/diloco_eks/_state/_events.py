"""Events of a Job or a pod that makes no progress, in the cluster's own words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from diloco_protocol import ReplicaState, ReplicaStatus
from diloco_protocol.backend import redact_and_cut

from ._facts import JobFacts, PodFacts, parse_time
from ._reading import mapping, text_of

#: Seconds for which a pod may be missing or may wait before its events are read.
STUCK_SECONDS = 15.0
_MOST = 3
_KEPT = 10  # any account may write events, in any number and of any length
_SHOWN = 600
_REASON_SHOWN = 128  # characters; Kubernetes' own reasons are shorter


@dataclass(frozen=True, slots=True)
class Event:
    """A warning among the events of a cluster.

    Attributes:
        reason: Kubernetes' word, such as FailedCreate.
        message: The text for people.
        count: How often the event occurred.
        last: When it occurred last, in Unix seconds.
    """

    reason: str
    message: str
    count: int
    last: float


def read_events(events: Iterable[Mapping[str, Any]]) -> list[Event]:
    """Return the latest warnings among events (core/v1), one of each reason, the latest first."""
    warnings = [_read(event) for event in events if event.get("type") == "Warning"]
    latest: dict[str, Event] = {}
    for warning in sorted(warnings, key=lambda event: -event.last):
        latest.setdefault(warning.reason, warning)
    return list(latest.values())[:_KEPT]


def is_stuck(status: ReplicaStatus, pod: PodFacts | None, job: JobFacts, now: float) -> bool:
    """Return whether a replica has been waiting for so long that its events may say why."""
    if status.state is not ReplicaState.PENDING or status.stopping or job.suspended:
        return False
    since = job.created if pod is None else pod.created
    return abs(now - since) >= STUCK_SECONDS  # the cluster's clock may be ahead of ours


def explained(status: ReplicaStatus, events: Iterable[Event]) -> ReplicaStatus:
    """Return a status with the latest warnings in its message, without repetitions."""
    new = [event for event in events if event.message.removesuffix("…") not in status.message]
    texts = [_told(event) for event in new[:_MOST]]
    if not texts:
        return status
    before = f"{status.message}; " if status.message else ""
    return replace(status, message=f"{before}the cluster says {'; '.join(texts)}")


def _told(event: Event) -> str:
    times = f" ({event.count} times)" if event.count > 1 else ""
    return f"{event.reason}{times}: {event.message}"


def _read(event: Mapping[str, Any]) -> Event:
    series = mapping(event.get("series"))
    count = series.get("count") or event.get("count")
    last = series.get("lastObservedTime") or event.get("lastTimestamp") or event.get("eventTime")
    return Event(
        redact_and_cut(text_of(event.get("reason")), _REASON_SHOWN),
        redact_and_cut(text_of(event.get("message")), _SHOWN),
        count if type(count) is int and count > 0 else 1,
        parse_time(last) or 0.0,
    )

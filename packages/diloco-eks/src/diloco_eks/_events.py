"""What a cluster says of a Job or a pod that does not get on: its events, in its own words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from diloco_protocol import ReplicaState, ReplicaStatus
from diloco_protocol.backend import redact_and_cut

from ._facts import JobFacts, PodFacts, parse_time

#: Seconds for which a pod may be missing or wait before its events are looked at.
STUCK_SECONDS = 15.0
_MOST = 3
_SHOWN = 600


@dataclass(frozen=True, slots=True)
class Event:
    """A warning.

    Attributes:
        reason: Kubernetes' word, such as FailedCreate.
        message: For a person.
        count: How often it was said.
        last: When it was said the last time, in Unix seconds.
    """

    reason: str
    message: str
    count: int
    last: float


def read_events(events: Iterable[Mapping[str, Any]]) -> list[Event]:
    """The warnings among events (core/v1), the latest first."""
    found = []
    for event in events:
        series = event.get("series") if isinstance(event.get("series"), dict) else {}
        count = (series or {}).get("count") or event.get("count")
        last = (
            (series or {}).get("lastObservedTime")
            or event.get("lastTimestamp")
            or event.get("eventTime")
        )
        if event.get("type") == "Warning":
            found.append(
                Event(
                    str(event.get("reason") or ""),
                    str(event.get("message") or ""),
                    count if type(count) is int and count > 0 else 1,
                    parse_time(last) or 0.0,
                )
            )
    return sorted(found, key=lambda event: -event.last)


def is_stuck(status: ReplicaStatus, pod: PodFacts | None, job: JobFacts, now: float) -> bool:
    """Whether a replica has been waiting for so long that its events may say why."""
    if status.state is not ReplicaState.PENDING or status.stopping or job.suspended:
        return False
    since = job.created if pod is None else pod.created
    return now - since >= STUCK_SECONDS


def explained(status: ReplicaStatus, events: Iterable[Event]) -> ReplicaStatus:
    """A status with the latest warnings in its message, one of each reason."""
    latest: dict[str, Event] = {}
    for event in events:
        if event.message not in status.message:
            latest.setdefault(event.reason, event)
    texts = [_text(event) for event in list(latest.values())[:_MOST]]
    if not texts:
        return status
    before = f"{status.message}; " if status.message else ""
    return replace(status, message=f"{before}the cluster says {'; '.join(texts)}")


def _text(event: Event) -> str:
    times = f" ({event.count} times)" if event.count > 1 else ""
    message = redact_and_cut(event.message, _SHOWN)
    return f"{event.reason}{times}: {message}"

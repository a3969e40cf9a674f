"""The state of a replica, made from its call's answer and its run's record. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from diloco_protocol import DilocoError, Outcome, Reason, ReplicaState, ReplicaStatus

from ._record import DamagedRecordError, entry

INTERRUPT_SECONDS = 30.0
"""Seconds that Modal leaves a container between SIGINT and its end."""

_OUT_OF_MEMORY = re.compile(
    r"out of memory|(?<![a-z])oom(?![a-z])|(?<![a-z])oom_?kill", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class End:
    """The end of a call.

    Attributes:
        status: Modal's word, such as ``"SUCCESS"``, ``"TERMINATED"`` or ``"KERNEL_OOM_KILL"``.
        text: The text that it returned, if that was asked for, and is one text.
        message: Modal's message about an end without success; or why there is no text.
        raised: Whether it raised an error, which is not decoded; Modal's message shows it.
        late: Whether there may be a text later, since it only could not be fetched now.
    """

    status: str
    text: str = ""
    message: str = ""
    raised: bool = False
    late: bool = False


@dataclass(frozen=True, slots=True)
class Trace:
    """The facts about a rank in the record.

    Attributes:
        attempt: Number of the newest attempt, from 1.
        started_at: Start of the newest attempt, in Unix seconds.
        open: Whether its newest life has no end.
        again: Whether Modal was going to run the call again when that life ended; None if it has no
            end, or if that was unknown.
        outcome: The outcome of the replica, if it had ended before it was told to end, or had
            succeeded nevertheless; otherwise empty.
        lives: The number of containers that it has had.
        ended_at: End of the newest life that has one.
        cancel: The entry of a cancel: what asked for it, and when.
        damage: What is wrong with some of its entries; the other attributes are made from the rest.
    """

    attempt: int = 1
    started_at: float | None = None
    open: bool = False
    lives: int = 0
    ended_at: float | None = None
    cancel: Mapping[str, Any] | None = None
    again: bool | None = None
    outcome: str = ""
    damage: str = ""

    @property
    def waited(self) -> bool:
        """Return whether a call was waiting for another container when it was terminated."""
        if not self.lives or self.open:
            return False
        if self.again is not None or not self.requested:
            return bool(self.again)
        # A cancel that came after the end was not its cause.
        return self.ended_at is not None and float(self.cancel["at"]) >= self.ended_at  # type: ignore[index]

    @property
    def over(self) -> bool:
        """Return whether the replica is known to have ended, even if it is unknown how."""
        seen = self.ended_at is not None and (self.open or not self.lives)
        return bool(self.outcome) or self.again is False or seen

    @property
    def requested(self) -> bool:
        """Return whether an executor was asked to end it."""
        return self.cancel is not None and self.cancel["by"] == "executor"


def trace_of(entries: Mapping[str, str], rank: int, *, damage: str = "") -> Trace:
    """Return the facts about a rank in the entries of a record.

    Args:
        entries: The entries of the record.
        rank: The rank of the replica.
        damage: What is known to be wrong with the entries. If given, damaged entries are ignored.

    Raises:
        DamagedRecordError: An entry does not have the form that this version writes.
    """

    def read(key: str) -> Mapping[str, Any] | None:
        try:
            return entry(entries, key)
        except DamagedRecordError:
            if not damage:
                raise
            return None

    lives = 0
    while f"life-{rank}-{lives + 1}" in entries:
        lives += 1
    cancel, over = read(f"cancel-{rank}"), read(f"over-{rank}")
    over_at = None if over is None else over["at"]
    if not lives:
        return Trace(cancel=cancel, ended_at=over_at, damage=damage)
    life = read(f"life-{rank}-{lives}") or {"attempt": lives, "at": None}
    end = read(f"end-{rank}-{lives}")
    attempt, started = life["attempt"], life["at"]
    while (again := read(f"attempt-{rank}-{attempt + 1}")) is not None:
        attempt, started = attempt + 1, again["at"]
    if end is None:
        return Trace(attempt, started, True, lives, over_at, cancel, damage=damage)
    # An app that was deployed with an earlier version does not say whether the call will run again.
    told = end.get("again"), end.get("outcome") or "", damage
    return Trace(max(attempt, end["started"]), started, False, lives, end["at"], cancel, *told)


def _status(state: ReplicaState, trace: Trace, url: str, **more: Any) -> ReplicaStatus:
    known = {"attempt": trace.attempt, "started_at": trace.started_at, "url": url}
    return ReplicaStatus(state, **{**known, **more})


def living(trace: Trace, url: str) -> ReplicaStatus:
    """Return the status of a call that has not ended, or whose container may still exist."""
    stopping, reason = trace.cancel is not None, None
    if stopping:
        reason = Reason.CANCEL_REQUESTED if trace.requested else Reason.STOPPED_EXTERNALLY
    # After its last life, a call is about to return.
    if trace.open or trace.again is False:
        return _status(ReplicaState.RUNNING, trace, url, reason=reason, stopping=stopping)
    # Between two lives, the next attempt is waiting.
    attempt = trace.attempt + (1 if trace.lives else 0)
    reason = reason or (Reason.PREEMPTED if trace.lives else Reason.QUEUED)
    return ReplicaStatus(ReplicaState.PENDING, attempt, reason, stopping=stopping, url=url)


def unknown(error: Exception, trace: Trace, url: str) -> ReplicaStatus:
    """Return the status of a replica about whose call Modal cannot be asked at present.

    The calls of other replicas can be asked about.
    """
    state = ReplicaState.RUNNING if trace.lives else ReplicaState.PENDING
    return _status(state, trace, url, stopping=trace.cancel is not None, message=str(error))


@dataclass(frozen=True, slots=True)
class Lost:
    """The reason why there is no result: it is lost, or could not be fetched yet (``late``)."""

    why: str
    late: bool = False


def ended(end: End, trace: Trace, url: str) -> tuple[ReplicaStatus, Any]:
    """Return the status of a call that has ended but was not terminated, and its result."""
    if end.status != "SUCCESS":
        return died(end, trace, url), None
    try:
        return reported(end.text, trace, url)
    except DilocoError as error:
        why = f"no replica's outcome was read from what the call returned: {end.message or error}"
    if trace.outcome:
        status, result = reported(trace.outcome, trace, url)
        return status, Lost(why, end.late) if isinstance(result, Lost) else result
    if trace.lives:  # its wrapper was diloco's
        return failed(Reason.ERROR, why, trace, url), None
    message = f"{why}; deploy the app with diloco_modal.build_app"
    return failed(Reason.START_FAILED, message, trace, url), None


def reported(text: str, trace: Trace, url: str) -> tuple[ReplicaStatus, Any]:
    """Return the status of a replica that has reported its outcome, and its result.

    In place of a result that the report lacks there is a :class:`Lost`.

    Raises:
        DilocoError: The text is not an outcome.
    """
    outcome = Outcome.from_json(text)
    more: dict[str, Any] = {
        "attempt": max(outcome.attempt, trace.attempt),
        "started_at": outcome.started_at or trace.started_at,
        "finished_at": outcome.finished_at or trace.ended_at,
        "exit_code": outcome.exit_code,
    }
    if outcome.exit_code == 0:
        status = _status(ReplicaState.SUCCEEDED, trace, url, reason=Reason.COMPLETED, **more)
        return status, Lost(outcome.error) if outcome.error else outcome.result
    more |= {"signal": outcome.signal, "message": outcome.error or ""}
    reason = outcome.reason
    if reason is Reason.CANCEL_REQUESTED:
        if trace.cancel is not None:
            return _cancelled(trace, url, **more), None
        reason = Reason.PLATFORM
    return _status(ReplicaState.FAILED, trace, url, reason=reason, **more), None


def failed(reason: Reason, message: str, trace: Trace, url: str, **more: Any) -> ReplicaStatus:
    """Return the status of a call that Modal has ended."""
    return _status(
        ReplicaState.FAILED, trace, url, reason=reason, message=message, native=message,
        finished_at=trace.ended_at, **more,
    )  # fmt: skip


def stopped(trace: Trace, url: str, now: float, grace: float) -> ReplicaStatus:
    """Return the status of a terminated call; Modal reports this before its container is gone."""
    at = now if trace.cancel is None else float(trace.cancel["at"])
    if trace.open and now - at < INTERRUPT_SECONDS + grace:
        return living(trace, url)
    if trace.waited:
        # Ended between two lives, so the next attempt was waiting.
        return _cancelled(trace, url, attempt=trace.attempt + 1, started_at=None, finished_at=at)
    return _cancelled(trace, url, finished_at=trace.ended_at)


def _cancelled(trace: Trace, url: str, **more: Any) -> ReplicaStatus:
    reason = Reason.CANCEL_REQUESTED if trace.requested else Reason.STOPPED_EXTERNALLY
    message = "cancelled" if trace.requested else "the call was stopped from outside"
    more["message"] = more.get("message") or message
    return _status(ReplicaState.CANCELLED, trace, url, reason=reason, **more)


def died(end: End, trace: Trace, url: str) -> ReplicaStatus:
    """Return the status of a call that ended without success, but was not terminated."""
    text = end.message or end.status
    if end.status == "TIMEOUT":
        return failed(Reason.TIMEOUT, text, trace, url, exit_code=124)
    if end.raised:
        # The wrapper never raises, so its module could not be imported, or the app is not diloco's.
        return failed(Reason.START_FAILED, text, trace, url)
    if _OUT_OF_MEMORY.search(f"{end.status} {text}"):
        return failed(Reason.OOM, text, trace, url, exit_code=137, signal="SIGKILL")
    return failed(Reason.PLATFORM, text, trace, url)


def with_damage(status: ReplicaStatus, trace: Trace) -> ReplicaStatus:
    """Add to a status what is wrong with its record, if anything is."""
    message = ". ".join(text for text in (status.message, trace.damage) if text)
    return replace(status, message=message) if trace.damage else status

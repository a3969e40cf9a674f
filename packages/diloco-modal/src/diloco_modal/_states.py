"""From a call's answer and the run's record to the state of a replica. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from diloco_protocol import DilocoError, Outcome, Reason, ReplicaState, ReplicaStatus

from ._record import DamagedRecordError, Numbers, cancel_of, check_whole, entry, numbers_of

if TYPE_CHECKING:
    from ._wire import End

INTERRUPT_SECONDS = 30.0
"""Modal's time between SIGINT and the end of a container."""

_OUT_OF_MEMORY = re.compile(
    r"out of memory|(?<![a-z])oom(?![a-z])|(?<![a-z])oom_?kill", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class Trace:
    """What the record says of a rank.

    Attributes:
        attempt: From 1.
        started_at: Start of the newest attempt, in Unix seconds.
        open: Whether its newest life has no end.
        again: Whether Modal was to run the call again when that life ended; None if it has no end,
            or nobody could tell.
        outcome: How the replica had ended before it was told to, or in spite of that; empty
            otherwise.
        lives: How many containers it has had.
        ended_at: End of the newest life that has one.
        cancel: The entry of a cancel: who, and when.
        damage: What is wrong with its entries; the rest is what the others say.
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
        """Whether a call that was terminated waited for another container then."""
        if not self.lives or self.open:
            return False
        if self.again is not None or not self.requested:
            return bool(self.again)
        # A cancel that came later than the end was not its cause.
        return self.ended_at is not None and float(self.cancel["at"]) >= self.ended_at  # type: ignore[index]

    @property
    def over(self) -> bool:
        """Whether the replica is known to have ended, though maybe not how."""
        seen = self.ended_at is not None and (self.open or not self.lives)
        return bool(self.outcome) or self.again is False or seen

    @property
    def requested(self) -> bool:
        """Whether an executor was asked for the end."""
        return self.cancel is not None and self.cancel["by"] == "executor"


def trace_of(
    entries: Mapping[str, str],
    rank: int,
    numbers: Numbers | None = None,
    *,
    damage: str = "",
) -> Trace:
    """What the entries of a record say of a rank.

    Args:
        entries: Of the record.
        rank: Of the replica.
        numbers: Of the entries, if they are known already.
        damage: What is known to be wrong with them. Then those that are damaged are passed over.

    Raises:
        DamagedRecordError: One of them is not what this version writes, or is missing.
    """
    numbers = numbers_of(entries) if numbers is None else numbers
    highest = {} if damage else numbers.get(rank, {})

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
    cancel, over = read(cancel_of(rank, numbers)), read(f"over-{rank}")
    over_at = None if over is None else over["at"]
    if not lives:
        check_whole(rank, 0, 0, highest)
        return Trace(cancel=cancel, ended_at=over_at, damage=damage)
    life = read(f"life-{rank}-{lives}") or {"attempt": lives, "at": None}
    end = read(f"end-{rank}-{lives}")
    attempt, started = life["attempt"], life["at"]
    while (again := read(f"attempt-{rank}-{attempt + 1}")) is not None:
        attempt, started = attempt + 1, again["at"]
    if end is not None:
        attempt = max(attempt, end["started"])
    check_whole(rank, lives, attempt, highest)
    if end is None:
        return Trace(attempt, started, True, lives, over_at, cancel, damage=damage)
    # An app that was deployed with an earlier version does not say whether the call comes again.
    told = end.get("again"), end.get("outcome") or "", damage
    return Trace(attempt, started, False, lives, end["at"], cancel, *told)


def living(trace: Trace, url: str) -> ReplicaStatus:
    """The status of a call that has not ended, or whose container may be there."""
    stopping, reason = trace.cancel is not None, None
    if stopping:
        reason = Reason.CANCEL_REQUESTED if trace.requested else Reason.STOPPED_EXTERNALLY
    # After its last life the call is about to return.
    if trace.open or trace.again is False:
        return ReplicaStatus(
            ReplicaState.RUNNING, trace.attempt, reason, stopping=stopping,
            started_at=trace.started_at, url=url,
        )  # fmt: skip
    # Between two lives it is the next attempt that waits.
    attempt = trace.attempt + (1 if trace.lives else 0)
    waits = Reason.PREEMPTED if trace.lives else Reason.QUEUED
    return ReplicaStatus(ReplicaState.PENDING, attempt, reason or waits, stopping=stopping, url=url)


def unknown(error: Exception, trace: Trace, url: str) -> ReplicaStatus:
    """The status of a replica whose call cannot be asked for now, beside others that can."""
    return ReplicaStatus(
        ReplicaState.RUNNING if trace.lives else ReplicaState.PENDING, trace.attempt, stopping=trace.cancel is not None,
        started_at=trace.started_at, url=url, message=str(error),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Lost:
    """Stands for a result that nobody has any more, or that could not be fetched yet (``late``); says why."""

    why: str
    late: bool = False


def ended(end: End, trace: Trace, url: str) -> tuple[ReplicaStatus, Any]:
    """The status of a call that has ended and was not terminated, and its result."""
    if end.status != "SUCCESS":
        return died(end, trace, url), None
    try:
        return reported(end.text, trace, url)
    except DilocoError as error:
        why = f"no replica's outcome was read from what the call returned: {end.message or error}"
    if trace.outcome:
        status, result = reported(trace.outcome, trace, url)
        return status, Lost(why, end.late) if isinstance(result, Lost) else result
    if trace.lives:  # its wrapper was ours
        return failed(Reason.ERROR, why, trace, url), None
    message = f"{why}; deploy the app with diloco_modal.build_app"
    return failed(Reason.START_FAILED, message, trace, url), None


def reported(text: str, trace: Trace, url: str) -> tuple[ReplicaStatus, Any]:
    """The status of a replica that has reported its outcome, and its result, or that it is :class:`Lost`.

    Raises:
        DilocoError: The text is no outcome.
    """
    outcome = Outcome.from_json(text)
    more: dict[str, Any] = {
        "attempt": max(outcome.attempt, trace.attempt),
        "started_at": outcome.started_at or trace.started_at,
        "finished_at": outcome.finished_at or trace.ended_at,
        "url": url,
    }
    if outcome.exit_code == 0:
        status = ReplicaStatus(ReplicaState.SUCCEEDED, reason=Reason.COMPLETED, exit_code=0, **more)
        return status, Lost(outcome.error) if outcome.error else outcome.result
    more |= {
        "exit_code": outcome.exit_code,
        "signal": outcome.signal,
        "message": outcome.error or "",
    }
    if outcome.reason is Reason.CANCEL_REQUESTED and trace.cancel is not None:
        return _cancelled(trace, more), None
    reason = Reason.PLATFORM if outcome.reason is Reason.CANCEL_REQUESTED else outcome.reason
    return ReplicaStatus(ReplicaState.FAILED, reason=reason, **more), None


def failed(
    reason: Reason,
    message: str,
    trace: Trace,
    url: str,
    code: int | None = None,
    signal: str | None = None,
) -> ReplicaStatus:
    """The status of a call that Modal has ended."""
    return ReplicaStatus(
        ReplicaState.FAILED, trace.attempt, reason, exit_code=code, signal=signal, message=message,
        started_at=trace.started_at, finished_at=trace.ended_at, url=url, native=message,
    )  # fmt: skip


def stopped(trace: Trace, url: str, now: float, grace: float) -> ReplicaStatus:
    """The status of a call that was terminated: Modal says so before its container is gone."""
    at = now if trace.cancel is None else float(trace.cancel["at"])
    if trace.open and now - at < INTERRUPT_SECONDS + grace:
        return living(trace, url)
    more = {"attempt": trace.attempt, "started_at": trace.started_at, "url": url}
    if trace.waited:
        # Ended between two lives: it was the next attempt that waited.
        waited = {**more, "attempt": trace.attempt + 1, "started_at": None, "finished_at": at}
        return _cancelled(trace, waited)
    return _cancelled(trace, {**more, "finished_at": trace.ended_at})


def _cancelled(trace: Trace, more: Mapping[str, Any]) -> ReplicaStatus:
    reason = Reason.CANCEL_REQUESTED if trace.requested else Reason.STOPPED_EXTERNALLY
    said = "cancelled" if trace.requested else "the call was stopped from outside"
    details = {**more, "message": more.get("message") or said}
    return ReplicaStatus(ReplicaState.CANCELLED, reason=reason, **details)


def died(end: End, trace: Trace, url: str) -> ReplicaStatus:
    """The status of a call that ended without success, and was not terminated."""
    text = end.message or end.status
    if end.status == "TIMEOUT":
        return failed(Reason.TIMEOUT, text, trace, url, 124)
    if end.raised:
        # The wrapper raises nothing, so its module could not be imported, or the app is not ours.
        return failed(Reason.START_FAILED, text, trace, url)
    if _OUT_OF_MEMORY.search(f"{end.status} {text}"):
        return failed(Reason.OOM, text, trace, url, 137, "SIGKILL")
    return failed(Reason.PLATFORM, text, trace, url)


def with_damage(status: ReplicaStatus, trace: Trace) -> ReplicaStatus:
    """A status that says what is wrong with its record, if anything is."""
    told = ". ".join(each for each in (status.message, trace.damage) if each)
    return replace(status, message=told) if trace.damage else status

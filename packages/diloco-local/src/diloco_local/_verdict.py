"""Judge how an attempt ended, from the evidence alone.

The function is pure, so that every observer reports the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from diloco_protocol import Outcome, Reason, ReplicaState, ReplicaStatus
from diloco_protocol.backend import check_seconds, read_wait_status

#: The last second that dates can express, in Unix seconds.
LATEST = 253_402_300_799


@dataclass(frozen=True, slots=True)
class Stop:
    """The reason and the time (Unix seconds) of the supervisor's order to end a living attempt.

    Attributes:
        reason: CANCEL_REQUESTED, STOPPED_EXTERNALLY (the supervisor itself was told to end) or
            TIMEOUT.
        at: The time, written down before the first signal, so that what ended earlier ended by
            itself.
    """

    reason: Reason
    at: float

    @classmethod
    def from_dict(cls, data: dict[str, Any] | None) -> Stop | None:
        """Make a stop from what `to_dict` returned; None stays None.

        Raises:
            ValueError: Supervisors do not end attempts for such a reason, or at such a time.
        """
        if data is None:
            return None
        reason = Reason(data["reason"])
        if reason not in {*_STOPPED, Reason.TIMEOUT}:
            raise ValueError(f"the reason {reason.value!r} is none to end an attempt")
        return cls(reason, check_seconds("at", data["at"], most=LATEST))


_STOPPED = {
    Reason.CANCEL_REQUESTED: "cancelled on request",
    Reason.STOPPED_EXTERNALLY: "the supervisor of the run was told to end, and ended the replica",
}


def verdict(
    *,
    attempt: int,
    outcome: Outcome | None,
    wait_status: int | None,
    stop: Stop | None,
    problem: str = "",
    oom: bool = False,
    started_at: float | None = None,
    finished_at: float | None = None,
) -> ReplicaStatus:
    """Return the terminal status of an attempt whose processes are all gone.

    Args:
        attempt: Its number.
        outcome: The outcome that the runner reported, None if it could not.
        wait_status: The status of the runner by ``waitpid``, None if no process waited for it.
        stop: The supervisor's order to end it, None if there was none.
        problem: The fault of an outcome that cannot be read.
        oom: Whether there is evidence that the kernel killed it for lack of memory.
        started_at: Unix seconds.
        finished_at: Unix seconds.
    """
    exit_code: int | None = None
    name: str | None = None
    message = ""
    if outcome is not None:
        exit_code, name, message = outcome.exit_code, outcome.signal, outcome.error or ""
        started_at = outcome.started_at if outcome.started_at is not None else started_at
        finished_at = outcome.finished_at if outcome.finished_at is not None else finished_at
    elif wait_status is not None:
        exit_code, name = read_wait_status(wait_status)
        how = f"was killed by {name}" if name else f"exited with code {exit_code}"
        message = problem or f"the replica's runner {how} before it could report an outcome"
    else:
        message = problem or (
            "the replica ended without reporting an outcome, and no supervisor could write down "
            "how (it had been killed, or the files were removed), so its exit code is not known"
        )

    native = "no outcome" if outcome is None else "outcome reported"
    if wait_status is not None:
        native += f", runner's wait status {wait_status}"

    def status(state: ReplicaState, reason: Reason, text: str) -> ReplicaStatus:
        return ReplicaStatus(
            state, attempt, reason, False, exit_code, name, text, started_at, finished_at,
            native=native,
        )  # fmt: skip

    if outcome is not None and outcome.exit_code == 0 and outcome.signal is None:
        # This holds for a stop, too: a success that won the race is a success.
        return status(ReplicaState.SUCCEEDED, Reason.COMPLETED, message)
    ended_before = None if outcome is None else outcome.finished_at
    was_told = outcome is not None and outcome.reason is Reason.CANCEL_REQUESTED
    # If there is an order of ours, the runner was told by us, even if the clock was set back in
    # between.
    by_our_order = was_told and stop is not None and stop.reason in _STOPPED
    if stop is not None and (by_our_order or ended_before is None or ended_before >= stop.at):
        if stop.reason is Reason.TIMEOUT:
            return status(ReplicaState.FAILED, Reason.TIMEOUT, message or "the timeout passed")
        return status(ReplicaState.CANCELLED, stop.reason, _STOPPED[stop.reason])
    if was_told:
        # The runner was told to end, but not by us: that is the evidence of a stop from outside.
        message = f"the runner was told to end: {message}"
        return status(ReplicaState.CANCELLED, Reason.STOPPED_EXTERNALLY, message)
    if outcome is not None and outcome.reason is Reason.TIMEOUT:
        return status(ReplicaState.FAILED, Reason.TIMEOUT, message)
    if oom and name == "SIGKILL":
        message += " (the kernel counted an out-of-memory kill)"
        return status(ReplicaState.FAILED, Reason.OOM, message)
    if outcome is not None:
        return status(ReplicaState.FAILED, outcome.reason, message)
    unexplained = problem or wait_status is None
    return status(ReplicaState.FAILED, Reason.PLATFORM if unexplained else Reason.ERROR, message)

"""The state of a replica, made from what SageMaker says about its job. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from diloco_protocol import (
    DilocoError,
    Outcome,
    Reason,
    ReplicaState,
    ReplicaStatus,
    UnavailableError,
    outcome_from_message,
)
from diloco_protocol.backend import shown, signal_name

from .._request import _names as names
from ._facts import ALIVE, ENDED, JobFacts, Transition

# The last three are no longer used, but may still be in old records.
_IMAGE = frozenset({"Downloading", "DownloadingTrainingImage"})
_BEFORE = _IMAGE | {"Starting", "Pending", "LaunchingMLInstances", "PreparingTrainingStack"}
_BETWEEN = frozenset({"Interrupted", "Restarting"})
_CLOCKS = 60.0
"""Seconds by which the clock of a job's machine may be behind."""
_TIMEOUTS = {
    "MaxRuntimeExceeded": (
        "the job reached its MaxRuntimeInSeconds, a backstop behind the runner's own timeout"
    ),
    "MaxWaitTimeExceeded": (
        "the job reached its MaxWaitTimeInSeconds: spot capacity did not suffice in time"
    ),
}

# SageMaker puts the exit code behind what a program has written about itself, which can be any
# text.
_EXIT_CODE = re.compile(r"AlgorithmError: .*, exit code: ([0-9]{1,3})", re.DOTALL)
# A ClientError comes from SageMaker itself; texts of a program stand behind "AlgorithmError: ".
_NO_MEMORY = "ClientError: Please use an instance type with more memory"


class UnknownWordError(UnavailableError):
    """Raised when a job has a status that this version does not know."""


def status_of(
    job: JobFacts, region: str, outcome: Outcome | None = None, *, cancelled: bool = False
) -> ReplicaStatus:
    """Return the status of a replica.

    Args:
        job: Its job.
        region: The region of the job, for the link to the console.
        outcome: The runner's report of a success, if it was read.
        cancelled: Whether an executor has asked for the end.

    Raises:
        UnknownWordError: The status of the job is new, or does not come from SageMaker.
    """
    if job.status not in ENDED | ALIVE:
        raise UnknownWordError(
            f"the training job {job.name} is {shown(job.status)}, and this version does not know "
            "what that means: upgrade diloco-sagemaker, or look at what stands between, such as a "
            "proxy"
        )
    lives = _lives(job.transitions)
    secondary = job.secondary or (job.transitions[-1].status if job.transitions else "")
    status = ReplicaStatus(
        ReplicaState.PENDING, len(lives), started_at=_started(job, lives),
        url=names.console_url(region, job.name), native=_native(job),
    )  # fmt: skip
    word = job.status
    if word == "Deleting" and secondary in {"Completed", "Failed", "Stopped", *_TIMEOUTS}:
        # Only a job that has ended can be deleted, and its replica keeps its state.
        word = "Stopped" if secondary in _TIMEOUTS else secondary
    if word not in ENDED:
        return _living(job, secondary, lives[-1], status, cancelled=cancelled)
    status = replace(status, finished_at=_ended(job))
    if word == "Completed":
        status = status if outcome is None else _reported(status, outcome, job)
        state, reason = ReplicaState.SUCCEEDED, Reason.COMPLETED
        return replace(status, state=state, reason=reason, exit_code=0)
    if word == "Failed":
        return _failed(job, status)
    late = _TIMEOUTS.get(secondary)
    if late is None and not cancelled and _waited_too_long(job):
        late = (
            "the job reached its MaxPendingTimeInSeconds: there was no capacity for "
            f"{job.most_pending} s"
        )
    if late is not None:
        return replace(status, state=ReplicaState.FAILED, reason=Reason.TIMEOUT, message=late)
    reason = Reason.CANCEL_REQUESTED if cancelled else Reason.STOPPED_EXTERNALLY
    message = "cancelled" if cancelled else "the job was stopped from outside"
    return replace(status, state=ReplicaState.CANCELLED, reason=reason, message=message)


def attempt_in(job: JobFacts) -> int:
    """Return the number of the attempt that the transitions show, from 1.

    They do not show restarts in place.
    """
    return len(_lives(job.transitions))


def _living(
    job: JobFacts,
    secondary: str,
    life: Sequence[Transition],
    status: ReplicaStatus,
    *,
    cancelled: bool,
) -> ReplicaStatus:
    stopping = job.status == "Stopping"
    message = next((step.message for step in reversed(job.transitions) if step.message), "")
    trained = any(step.status == "Training" for step in life)
    waits = secondary in _BEFORE | _BETWEEN or not (secondary or trained)
    asked = Reason.CANCEL_REQUESTED if cancelled and stopping else None
    status = replace(status, reason=asked, stopping=stopping, message=message)
    if trained if stopping else not waits:
        return replace(status, state=ReplicaState.RUNNING)
    if secondary in _BETWEEN:
        reason = Reason.PREEMPTED
    elif secondary in _IMAGE:
        reason = Reason.IMAGE
    else:
        reason = Reason.QUEUED if secondary == "Pending" else Reason.STARTING
    return replace(status, reason=asked or reason, started_at=None)


def _failed(job: JobFacts, status: ReplicaStatus) -> ReplicaStatus:
    outcome = outcome_in(job.failure)
    if outcome is None or outcome.exit_code == 0:
        trained = any(step.status == "Training" for step in job.transitions)
        reason, code, signal = outcome_without(job.failure, trained=trained)
        message = _explained(job)
    else:
        reason, code, signal = outcome.reason, outcome.exit_code, outcome.signal
        message = outcome.error or job.failure
        status = _reported(status, outcome, job)
        if reason in {Reason.CANCEL_REQUESTED, Reason.COMPLETED}:
            # The runner was told to end, but SageMaker does not say that the job was stopped.
            reason = Reason.PLATFORM if reason is Reason.CANCEL_REQUESTED else Reason.ERROR
    return replace(
        status, state=ReplicaState.FAILED, reason=reason, exit_code=code or None, signal=signal,
        message=message,
    )  # fmt: skip


def _reported(status: ReplicaStatus, outcome: Outcome, job: JobFacts) -> ReplicaStatus:
    """Return the status with the attempt that the runner reports, and when that began."""
    attempt = max(status.attempt, outcome.attempt)
    return replace(status, attempt=attempt, started_at=_told(outcome, job) or status.started_at)


def _waited_too_long(job: JobFacts) -> bool:
    """Return whether a job was stopped because it had waited for its MaxPendingTimeInSeconds.

    SageMaker has no status for this.
    """
    ended = _ended(job)
    if job.most_pending is None or ended is None:
        return False
    trained = job.started is not None or any(step.status == "Training" for step in job.transitions)
    return not trained and ended - job.created / 1000 >= job.most_pending


def _explained(job: JobFacts) -> str:
    text = job.failure or "the job failed, and SageMaker does not say why"
    if not job.failure.startswith("CapacityError"):
        return text
    return (
        f"{text} There was no {job.instance or 'instance'} to be had in this region. Another type, "
        "spot, a training plan or a longer pending_timeout= may help"
    )


def _lives(transitions: Sequence[Transition]) -> list[list[Transition]]:
    """Divide the history into attempts: an interruption begins the part of the next attempt."""
    lives: list[list[Transition]] = [[]]
    between = False
    for step in transitions:
        if step.status in _BETWEEN and not between:
            lives.append([])
        between = step.status in _BETWEEN
        lives[-1].append(step)
    return lives


def _started(job: JobFacts, lives: Sequence[Sequence[Transition]]) -> float | None:
    for step in lives[-1]:
        if step.status == "Training":
            return step.start
    return job.started if len(lives) == 1 and not job.transitions else None


def _told(outcome: Outcome, job: JobFacts) -> float | None:
    """Return when the runner says that it has started, if its job existed at that time."""
    started, ended = outcome.started_at, _ended(job)
    if started is None or not job.created / 1000 - _CLOCKS <= started <= (ended or started):
        return None
    return started


def _ended(job: JobFacts) -> float | None:
    if job.ended is not None:
        return job.ended
    last = job.transitions[-1] if job.transitions else None
    if last is not None and (last.end or last.start) is not None:
        return last.end or last.start
    return None if job.modified is None else job.modified / 1000


def _native(job: JobFacts) -> str:
    words = [f"{job.status}/{job.secondary}" if job.secondary else job.status]
    if job.billable is not None:
        words.append(f"billable {job.billable} s")
    if job.failure and outcome_in(job.failure) is None:
        words.append(job.failure)
    return "; ".join(words)


def outcome_in(failure: str) -> Outcome | None:
    """Return the runner's outcome in a FailureReason.

    None if there is no outcome, if it was cut, or if SageMaker reports another exit code.
    """
    try:
        outcome = outcome_from_message(failure[failure.find("{") : failure.rfind("}") + 1]).outcome
    except DilocoError:
        return None
    return outcome if _exit_code(failure) in {None, outcome.exit_code} else None


def outcome_without(failure: str, *, trained: bool) -> tuple[Reason, int | None, str | None]:
    """Return reason, exit code and signal of a failure about which the runner has left no message.

    Args:
        failure: The FailureReason.
        trained: Whether the program has run.
    """
    code = _exit_code(failure)
    signal = signal_name(code - 128) if code is not None and 128 < code <= 192 else None
    kind = failure.partition(":")[0]
    if kind in {"CapacityError", "InternalServerError", "InternalError"}:
        return Reason.PLATFORM, code, signal
    if failure.startswith(_NO_MEMORY):
        return Reason.OOM, 137, "SIGKILL"  # as the kernel ends a process that uses too much
    if not trained and code is None:
        return Reason.START_FAILED, None, None
    return Reason.ERROR, code, signal


def _exit_code(failure: str) -> int | None:
    """Return the exit code that SageMaker itself reports; None if there is none."""
    match = _EXIT_CODE.fullmatch(failure)
    return None if match is None or int(match[1]) > 255 else int(match[1])

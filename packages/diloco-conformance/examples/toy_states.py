"""What the toy cloud says, in the words of the protocol. Nothing here calls the cloud by itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

from toy_cloud import CloudError, Job

from diloco_protocol import (
    BackendError,
    ForbiddenError,
    InvalidRequestError,
    Reason,
    ReplicaNotFoundError,
    ReplicaState,
    ReplicaStatus,
    ResultLostError,
    RunConflictError,
    ThrottledError,
    UnavailableError,
)

T = TypeVar("T")

MARK = "fingerprint"
"""What all jobs of this backend have, and no others."""

ERRORS: dict[str, type[BackendError]] = {
    "Throttled": ThrottledError,
    "ServerError": UnavailableError,
    "Refused": UnavailableError,
    "ConnectionCut": UnavailableError,
    "Forbidden": ForbiddenError,
    "NotFound": ReplicaNotFoundError,
    "NoSuchSecret": InvalidRequestError,
    "BeingRemoved": RunConflictError,
}
STATES = {
    "QUEUED": (ReplicaState.PENDING, Reason.QUEUED),
    "RUNNING": (ReplicaState.RUNNING, None),
    "SUCCEEDED": (ReplicaState.SUCCEEDED, Reason.COMPLETED),
    "FAILED": (ReplicaState.FAILED, Reason.ERROR),
    "TIMED_OUT": (ReplicaState.FAILED, Reason.TIMEOUT),
    "STOPPED": (ReplicaState.CANCELLED, Reason.CANCEL_REQUESTED),
}
REASONS = {
    "OutOfMemory": Reason.OOM,
    "GangFailed": Reason.GANG_FAILED,
    "Preempted": Reason.PREEMPTED,
    "StoppedAtTheConsole": Reason.STOPPED_EXTERNALLY,
}


def ask(call: Callable[[], T]) -> T:
    """Call the cloud, with its errors in the words of the protocol."""
    try:
        return call()
    except CloudError as error:
        raise translated(error) from error


def translated(error: CloudError) -> BackendError:
    """An error of the cloud in the words of the protocol."""
    return ERRORS.get(error.code.split()[0], BackendError)(f"the toy cloud says {error.code}")


def is_ours(job: Job) -> bool:
    """Whether a job was launched by this backend: others may use the cloud, too."""
    return MARK in job.body


def result_of(job: Job) -> Any:
    """The result of a job that has succeeded; only that of the last attempt counts.

    Raises:
        ResultLostError: It is gone, or cannot be read.
    """
    text = job.outputs.get(job.attempt)
    if text is None:
        raise ResultLostError("the toy cloud has no output of this job any more")
    try:
        return json.loads(text)
    except (
        ValueError,
        RecursionError,
    ) as error:  # the second: nested more deeply than anybody reads
        raise ResultLostError(f"the output of this job is damaged: {error}") from error


def status_of(job: Job) -> ReplicaStatus:
    """The status of a replica, from its job alone."""
    state, reason = STATES[job.status]
    reason = REASONS.get(job.reason, reason)
    if job.stopping and job.reason != "GangFailed":
        reason = Reason.CANCEL_REQUESTED
    text = job.error or f"exited with code {job.exit_code} ({reason})"
    return ReplicaStatus(
        state,
        job.attempt,
        reason,
        job.stopping,
        job.exit_code,
        job.signal,
        text if state is ReplicaState.FAILED else "",
        job.started_at,
        job.finished_at,
        native=job.status,
    )

"""What can be said of a replica: its state, why, and the details."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal, Required, TypedDict


class ReplicaState(StrEnum):
    """The five states. There is no sixth: "no record" is :class:`ReplicaNotFoundError`, never a state.

    Allowed transitions: pending → running or terminal; running → terminal; running → pending only with the next attempt.
    Terminal states are never left.
    """

    PENDING = "pending"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def terminal(self) -> bool:
        """Whether the replica has ended for good."""
        return self in _TERMINAL


_TERMINAL = frozenset({ReplicaState.SUCCEEDED, ReplicaState.FAILED, ReplicaState.CANCELLED})


class Reason(StrEnum):
    """Why a replica is in its state."""

    QUEUED = "queued"
    """Pending: waits for its turn."""
    UNSCHEDULABLE = "unschedulable"
    """Pending: no free resource fits it at present."""
    IMAGE = "image"
    """Pending: its image is being pulled, or cannot be."""
    STARTING = "starting"
    """Pending: it has its resources, and its process has not started yet."""
    PREEMPTED = "preempted"
    """Between two attempts: its machine was taken away."""
    COMPLETED = "completed"
    """Succeeded."""
    ERROR = "error"
    """Failed: its program raised, exited non-zero or died by a signal."""
    OOM = "oom"
    """Failed: out of memory, with evidence."""
    TIMEOUT = "timeout"
    """Failed: longer than it was allowed to."""
    EVICTED = "evicted"
    """Failed: evicted from its machine."""
    START_FAILED = "start_failed"
    """Failed: its program could not be started."""
    GANG_FAILED = "gang_failed"
    """Failed: ended by the backend because a sibling failed."""
    PLATFORM = "platform"
    """Failed: a fault of the platform."""
    CANCEL_REQUESTED = "cancel_requested"
    """Cancelled, or being cancelled, by a cancel."""
    STOPPED_EXTERNALLY = "stopped_externally"
    """Cancelled by somebody outside, with evidence."""
    LOST = "lost"
    """``collect`` only: there is no record, so it counts as failed."""


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """Everything known about a replica at one moment.

    Attributes:
        state: One of the five states.
        attempt: The rank's n-th life, from 1.
        reason: Why it is in this state.
        stopping: It is being ended; the state stays running or pending until its resources are gone.
        exit_code: Its program's exit code, where known; 128 + n for signal n.
        signal: Name of the signal that ended it, such as ``"SIGKILL"``.
        message: What a person should read.
        started_at: Start of the attempt in Unix seconds.
        finished_at: End of the replica in Unix seconds.
        url: A page about it.
        native: The backend's own words.
    """

    state: ReplicaState
    attempt: int = 1
    reason: Reason | None = None
    stopping: bool = False
    exit_code: int | None = None
    signal: str | None = None
    message: str = ""
    started_at: float | None = None
    finished_at: float | None = None
    url: str | None = None
    native: str = ""


class ReplicaResult(TypedDict, total=False):
    """One entry of what ``collect`` returns."""

    rank: Required[int]
    status: Required[str]
    """One of the five states; not terminal where the deadline came first."""
    exit_code: Required[int | None]
    """0 exactly if it succeeded; None for a cancelled replica or one that has not ended."""
    error: Required[str | None]
    """What went wrong; of a success only that its result is lost, and why."""
    result: Required[Any]
    """What the entrypoint returned; None unless it succeeded."""
    reason: str | None
    signal: str | None
    attempt: int
    run_id: str


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend declares about itself.

    Attributes:
        cancel_scope: ``"replica"``: cancel ends one replica. ``"gang"``: it ends all of the run.
        failure_scope: ``"replica"``: the failure of one replica changes nothing for the others. ``"gang"``: it ends all of the
            run, the others with reason GANG_FAILED.
        distinguishes_pending: Whether pending and running can be told apart.
        result_channel: How results travel, in words.
        max_result_bytes: Largest result in bytes of JSON; None for no limit.
        log_streams: The streams that ``log_iter`` knows.
        max_timeout: Longest timeout in seconds; None for no limit.
        preemptible: Whether replicas may be taken away and started again.
        retention: Seconds for which records are kept after the end; None: until they are purged.
        counts_attempts: Whether the backend can tell a rank's attempts apart.
        remembers_ended: Whether the log and the attempt of a replica that the backend has ended (by a cancel, or since a
            sibling failed) can still be read. If not, reading the log raises ReplicaNotFoundError.
        calls_per_look: ``"run"``: a look at a run takes a few calls, however many ranks it has. ``"rank"``: it takes a few calls
            for each rank whose end the executor has not seen yet, since the backend cannot be asked about many at once.
    """

    cancel_scope: Literal["replica", "gang"]
    failure_scope: Literal["replica", "gang"] = "replica"
    distinguishes_pending: bool = True
    result_channel: str = ""
    max_result_bytes: int | None = None
    log_streams: tuple[str, ...] = ("combined",)
    max_timeout: float | None = None
    preemptible: bool = False
    retention: float | None = None
    counts_attempts: bool = True
    remembers_ended: bool = True
    calls_per_look: Literal["run", "rank"] = "run"

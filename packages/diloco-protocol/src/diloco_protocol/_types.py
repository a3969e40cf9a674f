"""The state of a replica, its reason, and the details."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal, Required, TypedDict


class ReplicaState(StrEnum):
    """The five states of a replica.

    There is no sixth state: "no record" is :class:`ReplicaNotFoundError`, never a state.

    Allowed transitions: pending → running or terminal; running → terminal;
    running → pending, but only with the next attempt. Terminal states are never left.

    Attributes:
        PENDING: It waits: for its turn, for resources, for its image, or between two attempts.
        RUNNING: Its program runs, or is being ended.
        SUCCEEDED: Its program has returned. Terminal.
        FAILED: It has ended in any other way that was not requested, including a timeout. Terminal.
        CANCELLED: It was ended by a cancel, or from outside, and its resources are gone. Terminal.
    """

    PENDING = "pending"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def terminal(self) -> bool:
        """Return whether the replica has ended for good."""
        return self in _TERMINAL


_TERMINAL = frozenset({ReplicaState.SUCCEEDED, ReplicaState.FAILED, ReplicaState.CANCELLED})


class Reason(StrEnum):
    """The reason why a replica is in its state.

    Attributes:
        QUEUED: Pending: it waits for its turn.
        UNSCHEDULABLE: Pending: no free resource fits it at present.
        IMAGE: Pending: its image is being pulled, or cannot be.
        STARTING: Pending: it has its resources, and its process has not started yet.
        PREEMPTED: Between two attempts: its machine was taken away.
        COMPLETED: Succeeded.
        ERROR: Failed: its program raised an error, exited with another code than 0, or was ended by
            a signal.
        OOM: Failed: out of memory, with evidence.
        TIMEOUT: Failed: it ran longer than it was allowed to.
        EVICTED: Failed: evicted from its machine.
        START_FAILED: Failed: its program could not be started.
        GANG_FAILED: Failed: ended by the backend because a sibling failed.
        PLATFORM: Failed: a fault of the platform.
        CANCEL_REQUESTED: Cancelled, or being cancelled, because the executor was asked to.
        STOPPED_EXTERNALLY: Cancelled from outside, with evidence.
        LOST: In results of ``collect`` only: there is no record, so it counts as failed.
    """

    QUEUED = "queued"
    UNSCHEDULABLE = "unschedulable"
    IMAGE = "image"
    STARTING = "starting"
    PREEMPTED = "preempted"
    COMPLETED = "completed"
    ERROR = "error"
    OOM = "oom"
    TIMEOUT = "timeout"
    EVICTED = "evicted"
    START_FAILED = "start_failed"
    GANG_FAILED = "gang_failed"
    PLATFORM = "platform"
    CANCEL_REQUESTED = "cancel_requested"
    STOPPED_EXTERNALLY = "stopped_externally"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """Everything known about a replica at one moment.

    Attributes:
        state: One of the five states.
        attempt: Which attempt of the rank this is, from 1.
        reason: Why it is in this state.
        stopping: Whether it is being ended; the state stays running or pending until its resources
            are gone.
        exit_code: Its program's exit code, where known; 128 + n for signal n.
        signal: Name of the signal that ended it, such as ``"SIGKILL"``.
        message: What happened, for people to read.
        started_at: Start of the attempt in Unix seconds.
        finished_at: End of the replica in Unix seconds; an executor never says that it was before
            ``started_at``.
        url: Address of a page about the replica.
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
    """One entry of the list that ``collect`` returns, made from the status and the result.

    It is a dict with all of these keys. It also has the metadata of its handle, text to text, by
    which a backend finds the replica again. For diloco-local, these are ``host``, ``root`` and
    ``uid``; for diloco-eks, ``job_name``, ``namespace``, ``server``, ``job_uid``, ``first_rank``
    and perhaps ``fingerprint``; for diloco-sagemaker, ``job_name``, ``account``, ``region`` and
    ``created``; for diloco-modal, ``function_call_id``, ``app``, ``function``, ``environment``,
    ``launch`` and ``launched_at``.

    Attributes:
        rank: The replica's rank.
        status: One of the five states; not terminal if the deadline came first.
        exit_code: 0 if and only if it succeeded; None for a cancelled replica or one that has not
            ended.
        error: What went wrong; for a success, only that its result is lost, and why.
        result: What the entrypoint returned; None unless it succeeded.
        reason: A :class:`Reason`, or None.
        signal: Name of the signal that has ended it, or None.
        attempt: Which attempt of the rank this is, from 1.
        run_id: Name of the launch that the replica belongs to.
    """

    rank: Required[int]
    status: Required[str]
    exit_code: Required[int | None]
    error: Required[str | None]
    result: Required[Any]
    reason: str | None
    signal: str | None
    attempt: int
    run_id: str


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The properties that a backend declares about itself.

    Attributes:
        cancel_scope: ``"replica"``: cancel ends one replica. ``"gang"``: it ends all of the run.
        failure_scope: ``"replica"``: the failure of one replica changes nothing for the others.
            ``"gang"``: it ends all of the run, the others with reason GANG_FAILED.
        distinguishes_pending: Whether pending and running can be told apart.
        result_channel: How results travel, in words.
        max_result_bytes: Largest result in bytes of JSON; None for no limit.
        log_streams: The streams that ``log_iter`` knows.
        max_timeout: Longest timeout in seconds; None for no limit.
        preemptible: Whether replicas may be taken away and started again.
        retention: Seconds for which records are kept after the end, and not much longer. None: they
            are kept until they are purged.
        counts_attempts: Whether the backend can tell a rank's attempts apart.
        remembers_ended: Whether the log and the attempt of a replica that the backend has ended (by
            a cancel, or because a sibling failed) can still be read. If not, reading the log raises
            ReplicaNotFoundError. In a gang, also whether an executor that never saw a rank run
            knows that it ran out of time together with a sibling.
        calls_per_look: ``"run"``: a look at a run takes a few calls, however many ranks it has.
            ``"rank"``: it takes a few calls for each rank whose end the executor has not seen yet,
            since the backend cannot be asked about many at once.
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

"""How a replica's part in a fixed run ended, and what the others conclude from it.

A failure spreads: when one replica dies, the others fail because of it, and each of them reports
its failure. The error that a user sees must name the replica that died first, not one that only
failed because of it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from .._errors import (
    RendezvousTimeoutError,
    ReplicaLostError,
    SyncError,
    SyncTimeoutError,
    UnequalSyncsError,
)
from .._redact import redact

_LONGEST_MESSAGE = 10_000


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a replica has come.

    Attributes:
        number: The number of syncs that it has finished, of all kinds. It is also the number of the
            next one.
        syncs: The same without those that only shared the initial values, as messages give it.
    """

    number: int = 0
    syncs: int = 0

    def plus(self, kind: str) -> Progress:
        """The progress after one more sync of this kind; see :attr:`._sync_job.SyncJob.kind`."""
        return Progress(self.number + 1, self.syncs + (kind != "initial"))

    @property
    def next(self) -> int:
        """The number of the next sync in messages, counted from 1."""
        return self.syncs + 1

    def __str__(self) -> str:
        return "1 sync" if self.syncs == 1 else f"{self.syncs} syncs"


@dataclass(frozen=True, slots=True)
class Ending:
    """How a replica's part in the run ended.

    Attributes:
        rank: The rank of the replica.
        event: Whether it has ``left`` after its last sync, or ``failed``.
        progress: How many syncs it had finished.
        message: Its error.
        cause_rank: The rank of the replica that caused its failure, if it was another one.
    """

    rank: int
    event: Literal["left", "failed"]
    progress: Progress
    message: str = ""
    cause_rank: int | None = None


def named_ranks(ranks: Sequence[int]) -> str:
    """Ranks as messages name them: ``rank 1``, or ``ranks 1, 2``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def as_text(error: BaseException) -> str:
    """The class of an error, and its message if it has one."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def failure(rank: int, progress: Progress, error: BaseException) -> Ending:
    """The ending of a replica that fails with an error."""
    message = redact(as_text(error))
    return Ending(rank, "failed", progress, message[:_LONGEST_MESSAGE], cause_of(rank, error))


def conclude(
    endings: Mapping[int, Ending], missing: Collection[int], rank: int, progress: Progress
) -> SyncError | None:
    """The error that follows from the endings of other replicas, if any does.

    Args:
        endings: The endings of other replicas, by rank.
        missing: The ranks that this replica is waiting for.
        rank: The rank of this replica.
        progress: How many syncs this replica has finished.
    """
    failed = [ending for _, ending in sorted(endings.items()) if ending.event == "failed"]
    for ending in failed:
        if ending.cause_rank is None:
            return ReplicaLostError(
                f"rank {ending.rank} failed after {ending.progress}: {ending.message}", ending.rank
            )
    finished = set()
    for other, ending in sorted(endings.items()):
        if ending.event != "left":
            continue
        if ending.progress.number > progress.number:
            finished.add(other)  # it left after the present sync, so it has done its part of it
        elif other in missing or any(late.cause_rank == other for late in failed):
            return UnequalSyncsError(
                f"rank {other} has left the run after {ending.progress}, so this replica (rank "
                f"{rank}) cannot take sync {progress.next}, which needs all replicas. All "
                "replicas must take the same number of syncs.",
                other,
            )
    for ending in failed:
        if ending.cause_rank == rank:
            return ReplicaLostError(
                f"rank {ending.rank} has counted this replica (rank {rank}) as lost after "
                f"{ending.progress}: {ending.message}",
                ending.rank,
            )
    for ending in failed:
        # If the cause is a replica that left after the present sync, the failure was in a later
        # sync and does not matter here.
        if ending.cause_rank is not None and ending.cause_rank not in finished:
            return ReplicaLostError(_as_told(ending), ending.cause_rank)
    return None


def _as_told(ending: Ending) -> str:
    """Return the message of a replica that failed because of another, which it names only once."""
    source = f"rank {ending.rank} found after {ending.progress}"
    _, _, message = ending.message.partition(": ")
    if message.startswith(f"rank {ending.cause_rank} "):
        return f"{message.rstrip('.')} (as {source})"
    return f"rank {ending.cause_rank} is lost, as {source}: {ending.message}"


def cause_of(rank: int | None, error: BaseException) -> int | None:
    """Return the rank of the replica that caused an error of rank ``rank``.

    Return None if no other replica did.
    """
    cause: int | None = None
    if isinstance(error, (ReplicaLostError, UnequalSyncsError)):
        cause = error.rank
    elif isinstance(error, (SyncTimeoutError, RendezvousTimeoutError)) and len(error.missing) == 1:
        cause = error.missing[0]
    return None if cause == rank else cause

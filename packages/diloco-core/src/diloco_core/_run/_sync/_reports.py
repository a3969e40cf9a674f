"""The reports of elastic syncs: of those that were completed, those that were left out, and those in which a life reloaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..._arithmetic._weights import shares
from ..._exchange._report import SyncReport

if TYPE_CHECKING:
    from ..._arithmetic._clip import Clipped
    from ..._arithmetic._sync_job import SyncJob
    from .._life._life import Life
    from .._records._records import Commit


def completed(
    life: Life, job: SyncJob, commit: Commit, contribution: str, *, since: float
) -> SyncReport:
    """The report of a sync whose record was obeyed. ``since`` is the time when it began, by the life's clock."""
    return SyncReport(
        sync=commit.sync - life.takes_means,
        fragment=job.name,
        committed=True,
        members=len(commit.members),
        bytes_sent=life.traffic.sent,
        bytes_received=life.traffic.received,
        wait_seconds=life.traffic.waited,
        exchange_seconds=life.timing.clock() - since - life.traffic.waited,
        contribution=contribution,
        weights=_weights(job, commit),
        clipped=_clipped(life, commit),
    )


def left(life: Life, job: SyncJob) -> SyncReport:
    """The report of a last sync whose end this life did not wait for."""
    return _not_completed(life, job, None, "none" if life.handover.open is None else "open")


def reloaded(life: Life, job: SyncJob, commit: Commit | None, contribution: str) -> SyncReport:
    """The report of a sync in which this life reloaded the published state. ``commit`` is its record, if that state holds it."""
    return _not_completed(life, job, commit, contribution, reloaded=True)


def _not_completed(
    life: Life, job: SyncJob, commit: Commit | None, contribution: str, *, reloaded: bool = False
) -> SyncReport:
    return SyncReport(
        sync=life.sync,
        fragment=job.name,
        committed=commit is not None,
        members=0 if commit is None else len(commit.members),
        bytes_sent=life.traffic.sent,
        bytes_received=life.traffic.received,
        wait_seconds=life.traffic.waited,
        exchange_seconds=0.0,
        contribution=contribution,
        reloaded=reloaded,
        weights=() if commit is None else _weights(job, commit),
        clipped=() if commit is None else _clipped(life, commit),
    )


def _clipped(life: Life, commit: Commit) -> tuple[Clipped, ...]:
    sync, clipped = life.fragments[commit.fragment].clipped
    return clipped if sync == commit.sync else ()  # a life that computed no shard has read no norms


def _weights(job: SyncJob, commit: Commit) -> tuple[float, ...]:
    return shares(job.terms.weighting, [member.amount for member in commit.members])

"""Reports, log messages and errors about a sync.

They say which ranks it waits for, which were missing, and what is lost.
"""

from __future__ import annotations

from functools import partial

from ..._arithmetic._contribution import shares
from ..._arithmetic._sync_job import SyncJob
from ..._errors import SyncTimeoutError
from ..._exchange._endings import named_ranks
from ..._exchange._report import SyncReport
from .._incarnation._incarnation import Incarnation
from .._records._keys import Delta, deltas, highest_epochs
from .._records._records import Commit
from .._round._membership import Folder


def report(
    incarnation: Incarnation,
    job: SyncJob,
    commit: Commit | None,
    contribution: str,
    *,
    since: float | None = None,
    reloaded: bool = False,
) -> SyncReport:
    """The report of a sync.

    Args:
        incarnation: The incarnation, which stands after the sync by now, if it has come so far.
        job: The fragment.
        commit: The record of the sync; None if this incarnation does not hold its result.
        contribution: What became of this incarnation's contribution.
        since: When the sync began, by the incarnation's clock, if it was completed.
        reloaded: Whether this incarnation had to start again from the published state.
    """
    at, clipped = (0, ()) if commit is None else incarnation.fragments[commit.fragment].clipped
    members = () if commit is None else commit.members
    traffic, seconds = incarnation.traffic, 0.0
    if since is not None:
        seconds = incarnation.timing.clock() - since - traffic.waited
    return SyncReport(
        sync=incarnation.sync - incarnation.takes_means,
        fragment=job.name,
        committed=commit is not None,
        members=len(members),
        bytes_sent=traffic.sent,
        bytes_received=traffic.received,
        wait_seconds=traffic.waited,
        exchange_seconds=seconds,
        contribution=contribution,
        reloaded=reloaded,
        weights=shares(job.terms.weighting, [each.amount for each in members]) if members else (),
        # An incarnation that computed no shard has read no norms.
        clipped=clipped if commit is not None and at == commit.sync else (),
    )


def timed_out(incarnation: Incarnation, sync: int, name: str, folder: Folder) -> SyncTimeoutError:
    """The error for an incarnation that has waited in vain for enough contributions.

    Args:
        incarnation: The incarnation.
        sync: Number of the sync.
        name: Name of the fragment.
        folder: What the incarnation has seen last.
    """
    if incarnation.fixed:
        reason = (
            "no rank is missing, so this process itself stood still or was slow. Look at what its "
            "machine did."
        )
        if folder.missing:
            reason = (
                f"it was still waiting for {named_ranks(folder.missing)}. Look at the logs of the "
                "missing ranks; if they are only slow, raise sync_timeout."
            )
        return SyncTimeoutError(
            f"sync {sync} of fragment {name} at {incarnation.store.uri} was not completed within "
            f"{incarnation.timing.sync_timeout:g} s; {reason}",
            list(folder.missing),
        )
    return SyncTimeoutError(
        f"sync {sync} of fragment {name} at {incarnation.store.uri} did not get contributions "
        f"from {incarnation.manifest.min_replicas} replicas (min_replicas) within "
        f"{incarnation.timing.sync_timeout:g} s (sync_timeout). Nothing was decided. "
        f"{_attendance(incarnation, folder)}. Look at the logs of the ranks that are missing. "
        "When enough replicas can be started, resume the run from its prefix.",
        list(folder.missing),
    )


def notice(
    incarnation: Incarnation,
    sync: int,
    name: str,
    folder: Folder,
    seconds: float,
    patience: float | None,
) -> str:
    """Return the log message about a wait of a grace or longer; empty if there is nothing to log.

    Args:
        incarnation: The incarnation.
        sync: Number of the sync.
        name: Name of the fragment.
        folder: What the incarnation has seen last.
        seconds: For how long it has waited.
        patience: Seconds after which the incarnation goes on without the sync; None: never.
    """
    quorum = incarnation.manifest.min_replicas
    if incarnation.fixed:
        if not folder.missing:
            return ""
        ranks = named_ranks(folder.missing)
        return (
            f"rank {incarnation.rank}: sync {sync} of fragment {name} has been waiting for {ranks} "
            f"for {seconds:.0f} s, and gives up after {incarnation.timing.sync_timeout:g} s at the "
            "latest (sync_timeout), or before that if a rank is lost and not started again in time"
        )
    if len(folder.chosen) >= quorum and seconds < 2 * incarnation.settings.grace:
        return ""  # one of the incarnations that have contributed is about to decide the sync
    end = f"This replica gives up after {incarnation.timing.sync_timeout:g} s (sync_timeout)"
    if patience is not None:
        end = f"This replica leaves without the sync after {patience:g} s"
    return (
        f"rank {incarnation.rank}: sync {sync} of fragment {name} has been waiting for "
        f"contributions from {quorum} replicas (min_replicas) for {seconds:.0f} s. {end}. "
        f"{_attendance(incarnation, folder)}"
    )


def say_who_is_missing(incarnation: Incarnation, commit: Commit) -> None:
    """Log which ranks are not in a sync that is decided, and which are in it again."""
    listing = partial(incarnation.store.list, deltas(commit.sync))
    for level, text in incarnation.attendance.committed(commit, listing, incarnation.now):
        incarnation.say.log(level, "%s", text)


def say_what_is_lost(
    incarnation: Incarnation,
    commit: Commit,
    became: str,
    left_open: Delta | None,
    steps: tuple[int, int] | None,
) -> None:
    """Log which inner steps no sync will ever hold, if this sync leaves some out.

    Args:
        incarnation: The incarnation.
        commit: The record of the sync.
        became: What became of what the incarnation had learned; see
            :func:`.._round._membership.fate`.
        left_open: The contribution, if it was made earlier and the incarnation had not waited for
            the end of the sync then.
        steps: The inner steps that the incarnation has taken for the sync (the first, and one past
            the last); None if there are none.
    """
    if steps is None:
        return
    if became == "counted" and left_open and left_open.stop < steps[1]:
        incarnation.say.warning(
            "inner steps %d to %d are dropped: this replica took them after its contribution to "
            "sync %d, for whose end it had not waited",
            left_open.stop,
            steps[1],
            commit.sync,
        )
    if became == "dropped" and incarnation.rank not in {member.rank for member in commit.members}:
        incarnation.say.warning(
            "sync %d was decided without this replica, which was late. Its inner steps %d to %d "
            "are lost because of late='drop'.",
            commit.sync,
            *steps,
        )


def _attendance(incarnation: Incarnation, folder: Folder) -> str:
    """A text on which ranks have contributed, and what is known about the others."""
    ranks = [rank for rank in range(incarnation.manifest.world_size) if rank not in folder.chosen]
    incarnations = highest_epochs(incarnation.store.list("claims/"))
    elsewhere, now = list(folder.elsewhere), incarnation.now
    others = incarnation.attendance.describe(ranks, incarnations, elsewhere, now)
    contributed = f"contributed: rank {', '.join(map(str, folder.chosen))}" if folder.chosen else ""
    text = "; ".join(filter(None, [contributed, others]))
    return text[:1].upper() + text[1:]

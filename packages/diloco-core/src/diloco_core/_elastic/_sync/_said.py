"""What the log and errors say of a sync: who is waited for, who was missing, and what is lost."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ..._errors import SyncTimeoutError
from .._log._keys import deltas, highest_epochs

if TYPE_CHECKING:
    from .._life._life import Life
    from .._log._keys import Delta
    from .._log._records import Commit
    from .._round._membership import Folder

_log = logging.getLogger("diloco_core")


def timed_out(life: Life, sync: int, name: str, folder: Folder) -> SyncTimeoutError:
    """The error of a life that has waited in vain for enough contributions.

    Args:
        life: The life.
        sync: The sync.
        name: Of the fragment.
        folder: What it has seen last.
    """
    return SyncTimeoutError(
        f"sync {sync} ({name}) at {life.store.uri} did not get contributions of {life.manifest.min_replicas} "
        f"replicas (min_replicas) within {life.timing.sync_timeout:g} s: {_who(life, folder)}. Nothing was decided. Look at "
        "the logs of those that are missing; when enough replicas can be started, the run can be resumed from its prefix.",
        list(folder.missing),
    )


def notice(
    life: Life, sync: int, name: str, folder: Folder, seconds: float, patience: float | None
) -> str:
    """What the log says of a wait that has lasted for a grace and more; empty where nothing is to be said.

    Args:
        life: The life.
        sync: The sync.
        name: Of the fragment.
        folder: What it has seen last.
        seconds: For how long it has waited.
        patience: Seconds after which it goes without the sync, where it does.
    """
    quorum = life.manifest.min_replicas
    if len(folder.chosen) >= quorum and seconds < 2 * life.settings.grace:
        return ""  # one of those that have contributed is about to decide
    end = f"gives up after {life.timing.sync_timeout:g} s"
    if patience is not None:
        end = f"is left out after {patience:g} s"
    return (
        f"rank {life.rank}: sync {sync} ({name}) has been waiting for contributions of {quorum} replicas "
        f"(min_replicas) for {seconds:.0f} s, and {end}: {_who(life, folder)}"
    )


def say_who_is_missing(life: Life, commit: Commit) -> None:
    """A sync is decided: say who is not in it, and who is in it again."""
    told = life.attendance.committed(commit, lambda: life.store.list(deltas(commit.sync)), life.now)
    for level, text in told:
        _log.log(level, "rank %d: %s", life.rank, text)


def say_what_is_lost(
    life: Life, commit: Commit, became: str, left_open: Delta | None, steps: tuple[int, int] | None
) -> None:
    """Say which inner steps no sync will ever hold, where this one leaves some out.

    Args:
        life: The life.
        commit: The record.
        became: What became of what it had learned; see :func:`.._round._membership.fate`.
        left_open: The contribution, where it was made before and this life had not waited for the end of the sync.
        steps: The inner steps that it has learned.
    """
    if steps is None:
        return
    if became == "counted" and left_open and left_open.stop < steps[1]:
        _log.warning(
            "rank %d: inner steps %d to %d are dropped: they came after the contribution to sync %d, whose end this "
            "replica had not waited for",
            life.rank,
            left_open.stop,
            steps[1],
            commit.sync,
        )
    if became == "dropped" and life.rank not in {member.rank for member in commit.members}:
        _log.warning(
            "rank %d: sync %d was decided without this replica, which was late. Its inner steps %d to %d are lost, since "
            "late='drop'.",
            life.rank,
            commit.sync,
            *steps,
        )


def _who(life: Life, folder: Folder) -> str:
    """Who has contributed, and what is known of everybody else."""
    ranks = [rank for rank in range(life.manifest.world_size) if rank not in folder.chosen]
    lives = highest_epochs(life.store.list("claims/"))
    others = life.attendance.describe(ranks, lives, list(folder.elsewhere), life.now)
    contributed = f"contributed: rank {', '.join(map(str, folder.chosen))}" if folder.chosen else ""
    return "; ".join(filter(None, [contributed, others]))

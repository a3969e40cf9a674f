"""What an outer loop says in the log (level warning): training that is lost, put back or not seen, and what to do about it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_log = logging.getLogger("diloco_core")


def sync_came_late(rank: int, due_after: int, came_after: int, idle: Sequence[str]) -> None:
    """A sync was late, since it waited for inner optimizers that have not stepped at all."""
    _log.warning(
        "rank %d: a sync was due after %d inner steps and comes after %d, since it waited for %s, which has not stepped "
        "in between. So it will be at every sync. Leave out an optimizer that does not step, and freeze its "
        "parameters; one that steps less often than the others needs a larger sync_every.",
        rank,
        due_after,
        came_after,
        " and ".join(idle),
    )


def left_without_a_step(rank: int, committed: int | None) -> None:
    """The block was left without an inner step; ``committed``: where an elastic run stands, None in strict runs."""
    if committed is None:
        _log.warning(
            "rank %d: the block was left without a single step of the inner optimizer, so nothing was synced. Was another "
            "optimizer stepped, such as a copy, or was its step() replaced?",
            rank,
        )
    else:
        _log.warning(
            "rank %d: the block was left without a single step of the inner optimizer. The run stands at outer step %d: to "
            "go on with it, train until outer.committed is larger than that.",
            rank,
            committed,
        )


def left_before_a_sync(rank: int, inner_steps: int, period: int) -> None:
    """The block was left before its first sync, and nothing is flushed."""
    _log.warning(
        "rank %d: the block was left after %d inner steps, before the first sync, which comes after %d. What was learned is "
        "dropped, since flush='none': the model is as it was when the block was entered.",
        rank,
        inner_steps,
        period,
    )


def went_back(rank: int, counted: int, inner_steps: int) -> None:
    """An elastic run has gone back to older states, which count fewer inner steps of this replica."""
    _log.warning(
        "rank %d: the run has gone back to older states, in which inner steps of this replica from %d on are not "
        "counted. It goes on with new batches. Those of the steps before %d are not learned, unless this replica is "
        "started again before its next contribution counts.",
        rank,
        counted,
        inner_steps,
    )


def reloaded(rank: int, committed: int, lost: Sequence[tuple[str, int]]) -> None:
    """The whole model was reloaded; ``lost``: fragments, and how many inner steps of each are in no sync."""
    _log.warning(
        "rank %d: reloaded the model as it is after outer step %d of the run. Inner steps of this replica that are lost by "
        "that, because no sync holds them yet: %s.",
        rank,
        committed,
        ", ".join(f"{steps} of fragment {name}" for name, steps in lost) or "none",
    )


def overtaken(rank: int, skipped: int) -> None:
    """The run has counted steps of an earlier life of this rank."""
    _log.warning(
        "rank %d: the run has counted %d inner steps that an earlier life of this rank has taken and this one has not. Pass "
        "over as many batches, or they are learned twice: see SyncReport.batches_to_skip, and on_sync.",
        rank,
        skipped,
    )


def put_back(rank: int, names: Sequence[str]) -> None:
    """Parameters were changed after the last sync, without a step."""
    _log.warning(
        "rank %d: parameters were changed after the last sync, and no step of the inner optimizer was seen: %s. Their "
        "committed values were put back, so that all replicas end with the same. What is to be done to the model at "
        "the end belongs after the block; a step that was not seen was that of another optimizer, or of a step() "
        "that was replaced.",
        rank,
        some(names),
    )


def left_out(rank: int, inner_steps: int, committed: int) -> None:
    """The last inner steps are in no sync, since too few replicas were left for it."""
    _log.warning(
        "rank %d: its last %d inner steps are not in the model: too few replicas were left to sync them. It ends with "
        "the values of outer step %d.",
        rank,
        inner_steps,
        committed,
    )


def parted(rank: int, why: str, inner_steps: int, committed: int) -> None:
    """Another replica of a strict run has left, so there can be no more syncs."""
    _log.warning(
        "rank %d: %s What this replica has learned in its last %d inner steps is dropped: it ends as all do, with the "
        "values of outer step %d. If it goes on training instead of leaving the block, that is an error.",
        rank,
        why,
        inner_steps,
        committed,
    )


def some(names: Sequence[str]) -> str:
    """At most three names, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(map(repr, names[:3])) + more

"""What an outer loop logs: where it goes on, and training that was lost, undone or not seen, with what to do about it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .._arithmetic._rate import Rate

_log = logging.getLogger("diloco_core")


def resumed(rank: int, committed: int, inner_steps: int, behind: int, restored: bool) -> None:
    """A fixed run is continued. If inner state was ``restored``, ``behind`` steps were counted after it."""
    _log.info(
        "rank %d: the run is continued from outer step %d, inner step %d. %s: %d (batches_to_skip).",
        rank,
        committed,
        inner_steps,
        "Inner steps that were counted after the inner state was saved"
        if restored
        else "No inner state was restored; inner steps that were counted",
        behind,
    )


def fresh_inner_state(rank: int, why: str, what: str, behind: int, level: int) -> None:
    """A rank begins without inner state although the run has counted steps of it, or what was saved cannot be used."""
    _log.log(
        level,
        "rank %d: this replica continues with a fresh inner state%s. %s start from the beginning. A data loader has to skip the "
        "%d batches that the run has counted for this rank (batches_to_skip).",
        rank,
        why,
        what,
        behind,
    )


def other_lr(rank: int, wish: Sequence[float], rate: Rate) -> None:
    """This replica has asked for an outer learning rate, and the run has taken the one that another replica asked for."""
    _log.warning(
        "rank %d: set_outer_lr() was called on this replica and asked for %s, but the run takes %s, which rank %d has asked for "
        "at the same time. Call set_outer_lr() again if that is not what you want.",
        rank,
        _rates(wish),
        _rates(rate.values),
        rate.rank,
    )


def unused_lr(rank: int, wish: Mapping[int, float]) -> None:
    """The block is left, and no sync has taken the outer learning rate that this replica has asked for."""
    _log.warning(
        "rank %d: set_outer_lr(%g) was called, but this replica has contributed to no sync since then, so nothing was changed.",
        rank,
        next(iter(wish.values())),
    )


def _rates(values: Sequence[float]) -> str:
    """Learning rates as text: one number if all outer parameter groups have the same."""
    return ", ".join(f"{value:g}" for value in (values[:1] if len(set(values)) == 1 else values))


def sync_came_late(rank: int, due_after: str, came_after: str, idle: Sequence[str]) -> None:
    """A sync was late, since it waited for inner optimizers that have not stepped at all."""
    _log.warning(
        "rank %d: a sync was due after %s and comes after %s, because it waited for %s, which has not stepped "
        "since the last sync. Every sync will be late in this way. If this optimizer never steps, leave it out and freeze its "
        "parameters; if it steps less often than the others, use a larger sync_every.",
        rank,
        due_after,
        came_after,
        " and ".join(idle),
    )


def slow_for_its_window(rank: int, seconds: float, window: str) -> None:
    """A window was over for as long again before this replica could contribute."""
    _log.warning(
        "rank %d: a sync, together with the steps of the delay, if there is one, and the first inner step after it, has taken "
        "%.3g s, but all replicas contribute every %s (sync_every, divided by the number of fragments). After that the others "
        "wait only for a grace. A replica that is always later than that is never counted: use a larger sync_every, a larger "
        "grace, a smaller delay or shorter inner steps.",
        rank,
        seconds,
        window,
    )


def left_without_a_step(rank: int, committed: int | None) -> None:
    """The block was left without an inner step. ``committed`` is the outer step of an elastic run; None in fixed runs."""
    if committed is None:
        _log.warning(
            "rank %d: the block was left without a single step of the inner optimizer, so nothing was synced. Was another "
            "optimizer stepped, such as a copy, or was its step() replaced?",
            rank,
        )
    else:
        _log.warning(
            "rank %d: the block was left without a single step of the inner optimizer. The run is at outer step %d. To "
            "continue it, train until outer.committed is larger than that.",
            rank,
            committed,
        )


def left_before_a_sync(rank: int, inner_steps: int, period: str, saved: bool) -> None:
    """The block was left before its first sync, and ``flush="none"`` drops its steps, or keeps them for a life that resumes."""
    _log.warning(
        "rank %d: the block was left after %d inner steps, before the first sync, which comes after %s. Because of flush='none', "
        "the model ends without these steps%s.",
        rank,
        inner_steps,
        period,
        ". They are saved, and a run that is resumed goes on with them"
        if saved
        else ", and they are lost",
    )


def went_back(rank: int, counted: int, inner_steps: int) -> None:
    """An elastic run has gone back to older states, which count fewer inner steps of this replica."""
    _log.warning(
        "rank %d: the run has returned to an older state, which does not hold the inner steps of this replica from step %d on. "
        "The replica continues with new batches. The batches of the steps before %d are lost, unless this replica is "
        "restarted before its next contribution is counted.",
        rank,
        counted,
        inner_steps,
    )


def reloaded(rank: int, committed: int, lost: Sequence[tuple[str, int]]) -> None:
    """The whole model was reloaded. ``lost`` has the names of fragments, and how many inner steps of each are in no sync."""
    _log.warning(
        "rank %d: reloaded the model as it is after outer step %d of the run. Inner steps of this replica that are lost "
        "because no sync holds them: %s.",
        rank,
        committed,
        _steps_of(lost) or "none",
    )


def open_steps_lost(rank: int, lost: Sequence[tuple[str, int]], saves: bool, advice: str) -> None:
    """A fixed run is resumed without the inner steps of some fragments since their last sync, if ``lost`` has any."""
    if lost:
        _log.warning(
            "rank %d: inner steps of this replica that are lost because neither a sync nor a saved inner state holds them: %s. "
            "%s.%s",
            rank,
            _steps_of(lost),
            "The run was stopped between two saves, or the newest save is gone"
            if saves
            else "With save_inner_every=0, nothing is saved or restored",
            advice,
        )


def lost_between_fragments(rank: int, lost: Sequence[tuple[str, int]]) -> None:
    """A life of an elastic run begins without steps that only the syncs of other fragments hold, if ``lost`` has any."""
    if lost:
        _log.warning(
            "rank %d: an earlier life of this rank ended between the syncs of two fragments. Inner steps that are lost because "
            "the syncs of these fragments do not hold them: %s. They are not repeated, since the sync of another fragment has "
            "counted them. Only a contribution that the earlier life had sent before may still be counted.",
            rank,
            _steps_of(lost),
        )


def overtaken(rank: int, skipped: int) -> None:
    """The run has counted steps of an earlier life of this rank."""
    _log.warning(
        "rank %d: the run has counted %d inner steps that an earlier life of this rank took and this one did not. Skip the same "
        "number of batches, or they are learned twice: see SyncReport.batches_to_skip, which on_sync receives.",
        rank,
        skipped,
    )


def loader_not_restored(rank: int, behind: int, before: int) -> None:
    """``batches_to_skip`` was asked for after inner state was restored, but ``stateful`` holds nothing that could be a loader."""
    _log.warning(
        "rank %d: batches_to_skip is %d, counted from the saved inner state, but no data loader was restored with it: stateful= "
        "has none. The %d batches before that are not counted. A loader that starts from the beginning would give them again: "
        "pass it in stateful=, or choose batches by outer.inner_steps.",
        rank,
        behind,
        before,
    )


def put_back(rank: int, names: Sequence[str]) -> None:
    """Parameters were changed after the last sync, without a step."""
    _log.warning(
        "rank %d: parameters were changed after the last sync without a step of the inner optimizer: %s. Their committed "
        "values were restored, and all replicas end with the same model. To change the model at the end of the training, do "
        "so after the block. If the change was a training step, it was taken by another optimizer, or by a step() that was "
        "replaced.",
        rank,
        some(names),
    )


def left_out(rank: int, inner_steps: int, committed: int) -> None:
    """The last inner steps are not part of any sync, since too few replicas were left for one."""
    _log.warning(
        "rank %d: the last %d inner steps of this replica are not in the model, because too few replicas were left to sync them. "
        "This replica ends with the values of outer step %d.",
        rank,
        inner_steps,
        committed,
    )


def parted(rank: int, why: str, inner_steps: int, committed: int) -> None:
    """Another replica of a fixed run has left, so there can be no more syncs."""
    _log.warning(
        "rank %d: %s The last %d inner steps of this replica are not in the model: like all others, it ends with the values of "
        "outer step %d. If inner state is saved, the save holds these steps, and a resumed run goes on with them. If this "
        "replica continues to train instead of leaving the block, an error is raised.",
        rank,
        why,
        inner_steps,
        committed,
    )


def _steps_of(fragments: Sequence[tuple[str, int]]) -> str:
    return ", ".join(f"{steps} of fragment {name}" for name, steps in fragments)


def some(names: Sequence[str]) -> str:
    """At most three of these names, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(map(repr, names[:3])) + more


def told_to_end(rank: int, inner_steps: int) -> None:
    """SIGTERM has come, and the inner step under way is over."""
    _log.warning(
        "rank %d: told to end (SIGTERM) after inner step %d: saving what can be saved, and leaving with exit code 143",
        rank,
        inner_steps,
    )


def not_saved_at_the_end(rank: int, error: Exception) -> None:
    """What belongs to this replica alone could not be saved when it was told to end."""
    _log.warning("rank %d: the inner state was not saved: %s", rank, error)


def residual_lost(rank: int, fragment: str, sync: int, advice: str) -> None:
    """Error feedback starts again from zero in a fragment, since what it held belongs to another state of the run."""
    _log.warning(
        "rank %d: error feedback of fragment %s starts again from zero after sync %d: what the codec had lost of this rank's "
        "contributions was not saved at the point from which the run goes on, and is not sent any more."
        + advice,
        rank,
        fragment,
        sync,
    )

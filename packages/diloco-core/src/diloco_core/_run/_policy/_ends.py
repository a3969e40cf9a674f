"""How a fixed run ends without one of its ranks, and who may go past such an end.

An end takes the number of the next sync in the log, so the store decides between a rank's return
and giving it up. A process that reads an end stops. Only ``resume=True`` goes past one, and only
past ends that an incarnation saw before it claimed its epoch.
"""

from __future__ import annotations

from ..._errors import (
    CorruptedObjectError,
    DivergedError,
    RendezvousError,
    ReplicaLostError,
    RunExistsError,
)
from ..._store._patient import Patient
from .._claims import check_claim, newest_epoch
from .._incarnation._incarnation import Incarnation
from .._records._attendance import read_farewell
from .._records._keys import commit_key, farewells, highest_epochs
from .._records._records import GivenUp, Rollback
from .._round._reload import ReloadError, Why

_NO_STATE = "Means have no state to go on with: start all ranks again on another prefix."
_ADVICE = (
    "To continue the run, start all of its ranks again with resume=True (from a launcher: under a "
    'new name, with this prefix as rendezvous_uri, and "connect_options": {"resume": True}).'
)


def refuse_ended(ends: list[Rollback], uri: str, *, means: bool = False) -> None:
    """Refuse to join a run that has ended, for a replica that was not told to resume it.

    Raises:
        RunExistsError: The run has ended.
    """
    if ends:
        advice = f"{_ADVICE} To begin another run, use another prefix."
        raise RunExistsError(
            f"the run at {uri} has ended: {_why(ends[0])}. {_NO_STATE if means else advice}"
        )


def refuse_again(incarnation: Incarnation) -> None:
    """Refuse to come back to a run of plain means, which keeps nothing to go on from.

    Raises:
        RunExistsError: An earlier process had the rank.
    """
    if incarnation.epoch > 1:
        raise RunExistsError(
            f"rank {incarnation.rank} of {incarnation.store.uri} was taken by an earlier process. "
            f"{_NO_STATE}"
        )


def nothing_to_resume(store: Patient, why: str = "") -> RendezvousError:
    """Return the error for a run that is to be resumed and is not there. It would come again."""
    error = RendezvousError(
        f"{store.uri} holds no run to resume{why}. Check the URI, or leave resume out to begin a "
        "new run."
    )
    error.final = True
    return error


def refuse_left(store: Patient, rank: int) -> None:
    """Refuse to come back, without being told to resume, to a run that this rank has left.

    Raises:
        RunExistsError: The newest incarnation of the rank has said that it has left.
    """
    epoch = newest_epoch(store, rank)
    for hint in farewells(store.list("deltas/")):
        # Of an incarnation whose claim is lost the hint alone may tell.
        is_newest = hint.rank == rank and hint.epoch >= epoch
        if is_newest and read_farewell(hint.key, store.peek).event == "left":
            raise RunExistsError(
                f"rank {rank} has left the run at {store.uri} after its last sync: it has ended. "
                f"{_ADVICE} To begin another run, use another prefix, or delete everything under "
                "this one. If this replica was started again in the same run, it failed after its "
                "block had ended, and its log before has that error."
            )


def refuse_reload(incarnation: Incarnation, reload: ReloadError) -> None:
    """End an incarnation that cannot use what it holds: no other has its own part of the sync.

    Raises:
        ReplicaLostError: The run has ended.
        FencedError: The run went back to older states, or has gone on with a newer incarnation of
            this rank.
        CorruptedObjectError: Something is damaged or gone.
        DivergedError: This incarnation does not hold what the others hold.
    """
    if reload.rollback is not None and reload.rollback.end is not None:
        obey_end(incarnation, reload.rollback)
    if reload.rollback is None:
        check_claim(incarnation)
        differs = reload.why is Why.DIFFERS
        advice = _advice(incarnation)
        if incarnation.settings.return_within:
            advice = "Start this replica again: it takes the run's newest state"
        raise (DivergedError if differs else CorruptedObjectError)(
            f"rank {incarnation.rank} cannot go on: {str(reload.damage or reload).rstrip('.')}. "
            f"{advice}"
        )


def obey_end(incarnation: Incarnation, record: Rollback) -> None:
    """Stop, unless this incarnation saw the end before it claimed its epoch.

    Raises:
        ReplicaLostError: The run has ended.
    """
    end = record.end
    if end is None or record.sync in incarnation.passed_over:
        return
    where = f"the run at {incarnation.store.uri} has ended before sync {record.sync}"
    error = ReplicaLostError(f"{where}: {_why(record)}. {_advice(incarnation)}", end.missed)
    # Started again, it would be refused, and that error would hide this one.
    error.final = not incarnation.settings.resume
    raise error


def give_up(
    incarnation: Incarnation, rank: int, known: int, why: str, sync: int, lost: int
) -> bool:
    """End the run without a rank, unless the rank has come back, or the sync is decided after all.

    Args:
        incarnation: The incarnation that has waited.
        rank: The rank that it has waited for.
        known: The epoch of that rank which is gone.
        why: What became of it, as a sentence.
        sync: The sync whose number the end takes: the next one that is not decided.
        lost: The rank that was lost first, if the other failed because of it; otherwise ``rank``.

    Returns:
        Whether there is an end at that number now, of whichever incarnation.

    Raises:
        FencedError: A newer incarnation of this replica's own rank has taken over.
    """
    check_claim(incarnation)
    # A newer incarnation claims its rank before it contributes, so its claim is enough to look for.
    epochs = highest_epochs(incarnation.store.list("claims/"))
    if epochs.get(rank, 0) > known:
        return False
    if not incarnation.settings.decides:
        advice = _advice(incarnation)
        if not incarnation.takes_means:
            reason = f"{incarnation.store.uri} ignores conditional writes"
            advice = f"{reason}, so the rank cannot come back by itself. {advice}"
        raise ReplicaLostError(f"{why.rstrip('.')}. {advice}", lost)
    states = [progress.sync for progress in incarnation.fragments]
    if sync > incarnation.sync + 1:
        # The sync that this incarnation is taking is decided, and will be finished by those who
        # resume the run.
        states[incarnation.index(sync - 1)] = sync - 1
    end = GivenUp(lost, incarnation.rank, why)
    before, run = incarnation.rollback, incarnation.run
    record = Rollback(sync, tuple(states), (), epochs, before, run=run, end=end)
    incarnation.store.create(commit_key(sync), record.to_json)
    return isinstance(incarnation.log(sync), Rollback)


def _advice(incarnation: Incarnation) -> str:
    return _NO_STATE if incarnation.takes_means else _ADVICE


def _why(record: Rollback) -> str:
    end = record.end
    assert end is not None
    # Writers take a sentence with a reason of at most 1000 characters.
    return f"{end.why[:2000].rstrip('.')}. Rank {end.by} has given it up"

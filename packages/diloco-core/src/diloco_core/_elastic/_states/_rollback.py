"""Going on from older states, where nothing can make the newest ones again and the user has agreed beforehand."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..._errors import CorruptedObjectError, FencedError
from .._log._keys import Delta, commit_key, highest_epochs
from .._log._records import Rollback
from .._log._rules import states
from .._repair import check_shard, read_done, readable_done
from .._round._reload import Reload
from ._history import History
from ._kept import keep
from ._load import NothingWholeError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ..._errors import NonFiniteUpdateError
    from .._life._life import Life

_log = logging.getLogger("diloco_core")


def roll_back(life: Life, reason: CorruptedObjectError | NonFiniteUpdateError) -> None:
    """Decide, as one decides a sync, that the run goes on from the newest state of every fragment that is whole.

    The record is created once under the number of the next sync: either it or a sync is there, and everybody obeys it.
    Afterwards the caller loads again, whoever was faster.

    Raises:
        CorruptedObjectError: A fragment has no whole state at all, or the run has gone back to the same states already.
        NonFiniteUpdateError: The run has gone back to the same states already.
        Reload: Somebody else has decided something meanwhile.
    """
    # The log is listed before anything else is looked at: whatever is decided from now on takes the number that this life
    # would take.
    history = History(life)
    last = _last_decided(life, history.recorded)
    if history.newest_rollback > (life.rollbacks[-1][0].sync if life.rollbacks else 0):
        return  # somebody else has decided it meanwhile
    going_back = []
    for index in range(len(life.fragments)):
        whole = next(
            (
                sync
                for sync in history.states(index)
                if _is_whole(life, index, sync, history.recorded)
            ),
            None,
        )
        if whole is None:
            if History(life).recorded != history.recorded:
                return  # others have gone on meanwhile, and removed what they do not need any more
            raise CorruptedObjectError(
                f"{str(reason).rstrip('.')}. No state of fragment {index} is whole any more, so there is nothing to go back to. "
                "Put copies of the lost objects back, or begin a new run on another prefix."
            ) from reason
        going_back.append(whole)
    given_up = history.given_up(going_back, last)
    if not given_up and history.rollbacks and history.rollbacks[-1][0].states == tuple(going_back):
        raise reason  # the run has gone back to these states already, and once more would bring nothing
    for index, state in enumerate(going_back):
        # With two newer states, complete at some time, a life that collects may have it on its list.
        if sum(life.index(sync) == index for sync in given_up) >= 2 and not keep(
            life, index, state
        ):
            return  # it has just been deleted: the caller looks again
    fence = highest_epochs(life.store.list("claims/"))
    before = max(history.newest_rollback, _rollback_before(life, min(going_back)))
    record = Rollback(last + 1, tuple(going_back), tuple(given_up), fence, before, run=life.run)
    _log.error(
        "rank %d: %s. As asked for by resume='newest-whole', the run goes on from the states after %s. Given up: %s. "
        "Earlier lives that did not agree to this stop.",
        life.rank,
        str(reason).rstrip("."),
        named_syncs(going_back),
        named_syncs(given_up),
    )
    life.store.create(commit_key(record.sync), record.to_json)


def _last_decided(life: Life, recorded: set[int]) -> int:
    """The last number of the log that is known to have been taken, also where its record is lost.

    What is published or contributed shows it: a life that has done so stands behind that number, and would take the next one.
    """
    published = [sync for sync, _ in states(life.store.list("state/"))]
    begun = [
        delta.sync - 1
        for delta in map(Delta.parse, life.store.list("deltas/"))
        if delta is not None
    ]
    return max([0, *recorded, *published, *begun])


@contextmanager
def saying_what_to_do(life: Life, *, going_back: bool) -> Iterator[None]:
    """Errors about what cannot be read say how the run can go on.

    Args:
        life: Whose.
        going_back: It has tried to go back to older states by itself.
    """
    try:
        yield
    except CorruptedObjectError as error:
        if isinstance(error, NothingWholeError):
            raise CorruptedObjectError(
                f"{str(error).rstrip('.')}. Neither this replica nor another one that lives has made it again, and no older "
                f"state in {life.store.uri} is whole: nothing can be exported, and resume='newest-whole' has nothing to go back "
                "to. Put copies of the lost objects back, or begin a new run on another prefix, from a checkpoint or an earlier "
                "export."
            ) from error
        if going_back:
            raise
        raise CorruptedObjectError(
            f"{str(error).rstrip('.')}. Neither this replica nor another one that lives has made it again, and the run cannot go "
            f"on without it. export() writes the newest state in {life.store.uri} that is whole to a file. Replicas that are "
            "started with resume='newest-whole' go on from that state: they give up the syncs after it, name them, and stop "
            "the lives that began before."
        ) from error


def obey_rollback(life: Life, rollback: Rollback) -> None:
    """See to it that a life that began before the rollback goes on only if it has agreed.

    Raises:
        FencedError: It has not.
    """
    given_up = f" (given up: {named_syncs(rollback.given_up)})" if rollback.given_up else ""
    if life.settings.resume != "newest-whole" and life.epoch <= rollback.fence.get(life.rank, 0):
        raise FencedError(
            f"the run at {life.store.uri} goes on from older states, since the results of later syncs could not be read any more"
            f"{given_up}: this life of rank {life.rank} (epoch {life.epoch}) began before that, and stops. "
            "Start it again to take part.",
            life.rank,
            life.epoch,
        )


def named_syncs(numbers: Sequence[int]) -> str:
    """As ``sync 7``, or ``syncs 7, 8``."""
    if not numbers:
        return "nothing"
    return f"sync{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _rollback_before(life: Life, sync: int) -> int:
    """Number of the newest rollback before a sync whose state is whole; 0 where there was none."""
    done = readable_done(life, sync, life.index(sync)) if sync else None
    return done.commit.rollback if done is not None and done.commit is not None else 0


def _is_whole(life: Life, index: int, sync: int, recorded: set[int]) -> bool:
    try:
        done = read_done(life, sync, index) if sync else life.manifest.done(index)
        if done is None:
            return False
        for number in range(life.fragments[index].job.layout.shards):
            if check_shard(life, sync, index, number) != (done.sums[number], done.rests[number]):
                return False
    except CorruptedObjectError as error:
        _log.error(
            "rank %d: the state of fragment %d after sync %d is not whole: %s",
            life.rank,
            index,
            sync,
            error,
        )
        return False
    except Reload as reload:
        if reload.rollback is None or reload.rollback.sync not in recorded:
            raise
        return False  # its number was closed, since its record was lost
    return True

"""Continuing from older states, if the newest ones cannot be made again and the user has agreed to that beforehand."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..._errors import CorruptedObjectError, FencedError
from .._policy._ends import obey_end
from .._records._keys import Delta, commit_key, highest_epochs
from .._records._records import Rollback
from .._records._rules import states
from .._repair import check_shard, read_done, readable_done
from .._round._reload import ReloadError
from ._history import History
from ._kept import keep
from ._load import NothingWholeError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ..._errors import NonFiniteUpdateError
    from .._life._life import Life

# More cannot be meant: the record would list each of them, and a number in a name may be anything.
_MOST_GIVEN_UP = 100_000


def roll_back(life: Life, reason: CorruptedObjectError | NonFiniteUpdateError) -> None:
    """Decide, in the way a sync is decided, that the run continues from the newest undamaged state of every fragment.

    The record is created once under the number of the next sync: either this record or that of a sync is there, and all lives
    obey it. Afterwards the caller has to load again, whichever life was faster.

    Raises:
        CorruptedObjectError: A fragment has no undamaged state at all, or the run has gone back to the same states already.
        NonFiniteUpdateError: The run has gone back to the same states already.
    """
    # The log is listed before anything else is read. So whatever is decided from now on takes the number that this life would
    # take, and only one of the two can be created.
    history = History(life)
    last = _last_decided(life, history.recorded)
    if history.newest_rollback > (life.rollbacks[-1][0].sync if life.rollbacks else 0):
        return  # another life has decided a rollback meanwhile
    going_back = []
    for index in range(len(life.fragments)):
        try:
            newest_whole = _newest_whole(life, index, history)
        except ReloadError:
            return  # another life has decided something meanwhile
        if newest_whole is None:
            if History(life).recorded != history.recorded:
                return  # the others have gone on meanwhile, and deleted what they do not need any more
            raise CorruptedObjectError(
                f"{str(reason).rstrip('.')}. All states of fragment {index} are damaged or gone: there is nothing to go back to. "
                "Restore the lost objects from copies, or begin a new run on another prefix."
            ) from reason
        going_back.append(newest_whole)
    if last - min(going_back) > _MOST_GIVEN_UP:
        raise CorruptedObjectError(
            f"{str(reason).rstrip('.')}. The newest number in the names of commits/ and state/ is {last}, and the newest "
            f"undamaged state is that after sync {min(going_back)}: a run does not lose so many syncs. Remove what "
            "the run has not written."
        ) from reason
    given_up = history.given_up(going_back, last)
    if not given_up and history.rollbacks and history.rollbacks[-1][0].states == tuple(going_back):
        raise reason  # the run has gone back to these states already; doing so once more would not help
    for index, state in enumerate(going_back):
        # If two newer states have ever been complete, another life may be about to delete this one.
        if sum(life.index(sync) == index for sync in given_up) >= 2 and not keep(
            life, index, state
        ):
            return  # it has just been deleted: the caller loads again
    fence = highest_epochs(life.store.list("claims/"))
    previous = max(history.newest_rollback, _rollback_before(life, min(going_back)))
    record = Rollback(last + 1, tuple(going_back), tuple(given_up), fence, previous, run=life.run)
    life.say.error(
        "%s. Because of resume='newest-whole', the run continues from the states after %s. Given up: %s. Replicas that "
        "were started earlier will stop, unless they have agreed to this too.",
        str(reason).rstrip("."),
        named_syncs(going_back),
        named_syncs(given_up),
    )
    life.store.create(commit_key(record.sync), record.to_json)


def _last_decided(life: Life, recorded: set[int]) -> int:
    """The last number of the log that is known to have been taken, even if its record is lost.

    Published states and contributions show it: a life that has written them is past that number and would take the next.
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
    """Make errors about objects that cannot be read say how the run can be continued.

    Args:
        life: The life.
        going_back: Whether it has already tried to go back to older states by itself.
    """
    try:
        yield
    except CorruptedObjectError as error:
        if isinstance(error, NothingWholeError):
            raise CorruptedObjectError(
                f"{str(error).rstrip('.')}. Neither this replica nor another running one could make it again, and every older "
                f"state in {life.store.uri} is damaged or gone: nothing can be exported, and resume='newest-whole' has nothing "
                "to go back to. Restore the lost objects from copies, or begin a new run on another prefix, from a checkpoint or "
                "an earlier export."
            ) from error
        if going_back:
            raise
        raise CorruptedObjectError(
            f"{str(error).rstrip('.')}. Neither this replica nor another running one could make it again, and the run cannot "
            f"continue without it. export() writes the newest undamaged state in {life.store.uri} to a file. Replicas that are "
            "started with resume='newest-whole' continue from that state: they give up the syncs after it, name these in the "
            "log, and stop replicas that were started before."
        ) from error


def obey_rollback(life: Life, rollback: Rollback) -> None:
    """Stop a life that began before the rollback, unless it has agreed to it.

    Raises:
        FencedError: The life has not agreed.
    """
    if rollback.end is not None:
        obey_end(life, rollback)
        return
    given_up = f" (given up: {named_syncs(rollback.given_up)})" if rollback.given_up else ""
    if life.settings.resume != "newest-whole" and life.epoch <= rollback.fence.get(life.rank, 0):
        raise FencedError(
            f"the run at {life.store.uri} continues from older states, because the results of later syncs could not be read any "
            f"more{given_up}. This life of rank {life.rank} (epoch {life.epoch}) began before that, so it stops. Start the "
            "replica again to take part.",
            life.rank,
            life.epoch,
        )


def named_syncs(numbers: Sequence[int]) -> str:
    """The numbers as text, such as ``sync 7``, or ``syncs 7, 8``; ``nothing`` if there are none."""
    if not numbers:
        return "nothing"
    return f"sync{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _rollback_before(life: Life, sync: int) -> int:
    """Number of the newest rollback before a sync whose state is undamaged; 0 if there was none."""
    done = readable_done(life, sync, life.index(sync)) if sync else None
    return done.commit.rollback if done is not None and done.commit is not None else 0


def _newest_whole(life: Life, index: int, history: History) -> int | None:
    """The sync of the newest undamaged state of a fragment; None if there is none."""
    syncs = history.states(index)
    return next((sync for sync in syncs if _is_whole(life, index, sync, history.recorded)), None)


def _is_whole(life: Life, index: int, sync: int, recorded: set[int]) -> bool:
    try:
        done = read_done(life, sync, index) if sync else life.manifest.done(index)
        if done is None:
            return False
        for number in range(life.fragments[index].job.layout.shards):
            for part in life.made_of(sync, index):
                sums = check_shard(life, part, index, number)
                if sums is None or (
                    part == sync and sums != (done.sums[number], done.rests[number])
                ):
                    return False
    except ReloadError as reload:
        # If the rollback was there from the beginning, the record was lost, and the rollback was written in its place.
        if reload.rollback is not None and reload.rollback.sync in recorded:
            return False
        raise
    except CorruptedObjectError as error:
        life.say.error(
            "the state of fragment %d after sync %d is damaged: %s",
            index,
            sync,
            error,
        )
        return False
    return True

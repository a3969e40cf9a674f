"""Going back to older states.

A run does so if the newest ones cannot be made again, and the user has agreed to that beforehand.
Its history says which of its complete states and syncs still count then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ..._errors import CorruptedObjectError, FencedError, NonFiniteUpdateError
from .._incarnation._incarnation import Incarnation
from .._policy._ends import obey_end
from .._records._keys import Delta, commit_key, highest_epochs
from .._records._records import Commit, Rollback
from .._records._rules import done_states, in_force
from .._records._rules import states as published_states
from .._repair import check_shard, commit_again, read_done, readable_done, readable_log
from .._round._reload import ReloadError
from ._kept import keep

# More cannot be meant: the record would list each of them, and a number in a name may be anything.
_MOST_GIVEN_UP = 100_000
# A run loses a few records at most; a rollback with a far higher number than theirs is not its own.
_MOST_LOST = 1000


class NothingWholeError(CorruptedObjectError):
    """No state of a fragment is whole, not even the initial one; never leaves the exchange."""


class History:
    """The complete states of every fragment, and the rollbacks that affect them.

    Args:
        incarnation: The incarnation that reads the store.

    Attributes:
        newest: The newest sync of every fragment whose state is complete, whether it counts or not;
            0 for the initial state.
        recorded: The numbers that have a record in the log. If a lower number is missing, its
            record is lost.
        rollbacks: The known rollbacks, in the order of the log.
        newest_rollback: Number of the newest of them; 0 if none is known.
    """

    def __init__(self, incarnation: Incarnation) -> None:
        self._incarnation = incarnation
        self._done = done_states(incarnation.store.list("state/"), len(incarnation.fragments))
        self.newest = [max(syncs, default=0) for syncs in self._done]
        self.recorded = incarnation.recorded()
        self.rollbacks = _rollbacks(incarnation, self.recorded)
        self.newest_rollback = self.rollbacks[-1].sync if self.rollbacks else 0

    def states(self, index: int) -> list[int]:
        """Return the syncs after which a fragment has a complete state that counts, newest first.

        The last one is 0, for the initial state.
        """
        syncs = sorted({0, *self._done[index]}, reverse=True)
        return [sync for sync in syncs if in_force(sync, index, self.rollbacks)]

    def given_up(self, states: list[int], last: int) -> list[int]:
        """Return the syncs that would no longer count if the run continued from these states.

        They are those up to ``last`` that count now.
        """
        numbers = {rollback.sync for rollback in self.rollbacks}
        return [
            sync
            for sync in range(min(states) + 1, last + 1)
            if sync > states[self._incarnation.index(sync)]
            and sync not in numbers
            and in_force(sync, self._incarnation.index(sync), self.rollbacks)
        ]


def given_up_since(incarnation: Incarnation, sync: int, rollback: int) -> bool:
    """Say whether the run has since given up something that an incarnation held after a sync.

    Also true if the log cannot tell any more.

    Args:
        incarnation: The incarnation that reads the log.
        sync: Number of the sync.
        rollback: Number of the newest rollback at that time.
    """
    number = incarnation.rollback
    while number > rollback:
        record = readable_log(incarnation, number)
        if not isinstance(record, Rollback) or sync >= min(record.given_up, default=number):
            return True
        number = record.rollback
    return number != rollback


def ends_in_log(incarnation: Incarnation) -> list[Rollback]:
    """The ends of a fixed run that the log holds, the newest first."""
    rollbacks = _rollbacks(incarnation, incarnation.recorded())
    return [rollback for rollback in reversed(rollbacks) if rollback.end is not None]


def close_gaps(incarnation: Incarnation, history: History) -> None:
    """Write a record for every number before the newest rollback whose record is lost.

    So no incarnation decides it once more. A sync that still counts gets the same record again, if
    the record of its state holds a copy. A sync that was given up gets a rollback to the states
    before it instead. The rollback that gave it up is newer, so no incarnation begins there.

    Raises:
        CorruptedObjectError: So many are lost that the rollback cannot be one of this run.
    """
    newest = history.newest_rollback
    lost_records = newest - 1 - sum(number < newest for number in history.recorded)
    if lost_records > _MOST_LOST:
        raise CorruptedObjectError(
            f"{incarnation.origin(commit_key(newest))} is a rollback, but {lost_records} of the "
            f"records before it are gone, and at most {_MOST_LOST} can be made up for. If this run "
            "has not written it, delete it; otherwise put the others back."
        )
    rollbacks = history.rollbacks
    for lost in sorted(set(range(1, history.newest_rollback)) - history.recorded):
        index = incarnation.index(lost)
        gave_up = (each for each in rollbacks if each.states[index] < lost < each.sync)
        giving_up = next(gave_up, None)
        if incarnation.store.peek(commit_key(lost)) is not None:
            continue  # the record is there: the listing was out of date
        if giving_up is None:
            commit_again(incarnation, lost, None)
            continue
        count = len(incarnation.fragments)
        before = (_last_before(lost, each, count) for each in range(count))
        states = tuple(map(min, giving_up.states, before))
        previous = max((rollback.sync for rollback in rollbacks if rollback.sync < lost), default=0)
        closing = Rollback(lost, states, (), giving_up.fence, previous, run=incarnation.run)
        incarnation.say.error(
            "the record of sync %d is lost, and the run has given that sync up. Writing a "
            "rollback in its place, so that its number is not used again.",
            lost,
        )
        incarnation.store.create(commit_key(lost), closing.to_json)


def _last_before(sync: int, index: int, count: int) -> int:
    """The last sync of a fragment before another sync; 0 if there is none."""
    return max(0, sync - 1 - (sync - 2 - index) % count)


def _rollbacks(incarnation: Incarnation, recorded: set[int]) -> list[Rollback]:
    """The rollbacks that can be read, in the order of the log.

    Every record names the newest rollback before it. So this goes from the end of the log back from
    one rollback to the next, and other records that are lost do not stop it. If a record cannot be
    read, the record before it is read instead.
    """
    newest = max(recorded, default=0)
    # A listing may be out of date.
    while incarnation.store.peek(commit_key(newest + 1)) is not None:
        newest += 1
        recorded.add(newest)
    rollbacks: list[Rollback] = []
    sync = newest
    while sync:
        record = _record(incarnation, sync)
        if record is None:
            sync = max((number for number in recorded if number < sync), default=0)
            continue
        if isinstance(record, Rollback):
            rollbacks.append(record)
        sync = record.rollback
    return rollbacks[::-1]


def _record(incarnation: Incarnation, sync: int) -> Commit | Rollback | None:
    """Return a record of the log, or its copy in the record of the state.

    None if neither can be read.
    """
    record = readable_log(incarnation, sync)
    if record is None and (done := readable_done(incarnation, sync, incarnation.index(sync))):
        return done.commit
    return record


def roll_back(
    incarnation: Incarnation, reason: CorruptedObjectError | NonFiniteUpdateError
) -> None:
    """Decide that the run continues from the newest undamaged state of every fragment.

    This is decided like a sync: the record is created once, under the number of the next sync.
    Either this record or that of a sync is there, and all incarnations obey it. Afterwards the
    caller has to load again, whichever incarnation was faster.

    Raises:
        CorruptedObjectError: A fragment has no undamaged state at all, or the run has gone back to
            the same states already.
        NonFiniteUpdateError: The run has gone back to the same states already.
    """
    # The log is listed before anything else is read. So whatever is decided from now on takes the
    # number that this incarnation would take, and only one of the two can be created.
    history = History(incarnation)
    recorded = history.recorded
    last = _last_decided(incarnation, recorded)
    known = incarnation.standing.rollbacks
    if history.newest_rollback > (known[-1].sync if known else 0):
        return  # another incarnation has decided a rollback meanwhile
    going_back = []
    for index in range(len(incarnation.fragments)):
        try:
            syncs = history.states(index)
            whole = (sync for sync in syncs if _is_whole(incarnation, index, sync, recorded))
            newest_whole = next(whole, None)
        except ReloadError:
            return  # another incarnation has decided something meanwhile
        if newest_whole is None:
            if History(incarnation).recorded != recorded:
                # The others have gone on meanwhile, and deleted what they do not need any more
                return
            raise CorruptedObjectError(
                f"{str(reason).rstrip('.')}. All states of fragment {index} are damaged or gone: "
                "there is nothing to go back to. Restore the lost objects from copies, or begin a "
                "new run on another prefix."
            ) from reason
        going_back.append(newest_whole)
    if last - min(going_back) > _MOST_GIVEN_UP:
        raise CorruptedObjectError(
            f"{str(reason).rstrip('.')}. The newest number in the names of commits/ and state/ is "
            f"{last}, and the newest undamaged state is that after sync {min(going_back)}: a run "
            "does not lose so many syncs. Remove what the run has not written."
        ) from reason
    given_up = history.given_up(going_back, last)
    if not given_up and history.rollbacks and history.rollbacks[-1].states == tuple(going_back):
        # The run has gone back to these states already; doing so once more would not help
        raise reason
    for index, state in enumerate(going_back):
        # If two newer states have ever been complete, another incarnation may soon delete this one.
        in_danger = sum(incarnation.index(sync) == index for sync in given_up) >= 2
        if in_danger and not keep(incarnation, index, state):
            return  # it has just been deleted: the caller loads again
    fence = highest_epochs(incarnation.store.list("claims/"))
    previous = max(history.newest_rollback, _rollback_before(incarnation, min(going_back)))
    states, lost = tuple(going_back), tuple(given_up)
    record = Rollback(last + 1, states, lost, fence, previous, run=incarnation.run)
    incarnation.say.error(
        "%s. Because of resume='newest-whole', the run continues from the states after %s. Given "
        "up: %s. Replicas that were started earlier will stop, unless they have agreed to this "
        "too.",
        str(reason).rstrip("."),
        named_syncs(going_back),
        named_syncs(given_up),
    )
    incarnation.store.create(commit_key(record.sync), record.to_json)


def _last_decided(incarnation: Incarnation, recorded: set[int]) -> int:
    """The last number of the log that is known to have been taken, even if its record is lost.

    Published states and contributions show it: an incarnation that has written them is past that
    number and would take the next.
    """
    published = [sync for sync, _ in published_states(incarnation.store.list("state/"))]
    contributions = filter(None, map(Delta.parse, incarnation.store.list("deltas/")))
    begun = [delta.sync - 1 for delta in contributions]
    return max([0, *recorded, *published, *begun])


@contextmanager
def saying_what_to_do(incarnation: Incarnation, *, going_back: bool) -> Iterator[None]:
    """Make errors about objects that cannot be read say how the run can be continued.

    Args:
        incarnation: The incarnation.
        going_back: Whether it has already tried to go back to older states by itself.
    """
    try:
        yield
    except CorruptedObjectError as error:
        if isinstance(error, NothingWholeError):
            raise CorruptedObjectError(
                f"{str(error).rstrip('.')}. Neither this replica nor another running one could "
                f"make it again, and every older state in {incarnation.store.uri} is damaged or "
                "gone: nothing can be exported, and resume='newest-whole' has nothing to go back "
                "to. Restore the lost objects from copies, or begin a new run on another prefix, "
                "from a checkpoint or an earlier export."
            ) from error
        if going_back:
            raise
        raise CorruptedObjectError(
            f"{str(error).rstrip('.')}. Neither this replica nor another running one could make it "
            "again, and the run cannot continue without it. export() writes the newest undamaged "
            f"state in {incarnation.store.uri} to a file. Replicas that are started with "
            "resume='newest-whole' continue from that state: they give up the syncs after it, name "
            "these in the log, and stop replicas that were started before."
        ) from error


def obey_rollback(incarnation: Incarnation, rollback: Rollback) -> None:
    """Stop an incarnation that began before the rollback, unless it has agreed to it.

    Raises:
        FencedError: The incarnation has not agreed.
    """
    if rollback.end is not None:
        obey_end(incarnation, rollback)
        return
    given_up = f" (given up: {named_syncs(rollback.given_up)})" if rollback.given_up else ""
    began_before = incarnation.epoch <= rollback.fence.get(incarnation.rank, 0)
    if began_before and incarnation.settings.resume != "newest-whole":
        raise FencedError(
            f"the run at {incarnation.store.uri} continues from older states, because the results "
            f"of later syncs could not be read any more{given_up}. This incarnation of rank "
            f"{incarnation.rank} (epoch {incarnation.epoch}) began before that, so it stops. "
            "Start the replica again to take part.",
            incarnation.rank,
            incarnation.epoch,
        )


def named_syncs(numbers: Sequence[int]) -> str:
    """The numbers as text, such as ``sync 7``, or ``syncs 7, 8``; ``nothing`` if there are none."""
    if not numbers:
        return "nothing"
    return f"sync{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _rollback_before(incarnation: Incarnation, sync: int) -> int:
    """Number of the newest rollback before a sync whose state is undamaged; 0 if there was none."""
    done = readable_done(incarnation, sync, incarnation.index(sync)) if sync else None
    return done.commit.rollback if done is not None and done.commit is not None else 0


def _is_whole(incarnation: Incarnation, index: int, sync: int, recorded: set[int]) -> bool:
    try:
        done = read_done(incarnation, sync, index) if sync else incarnation.manifest.done(index)
        if done is None:
            return False
        for number in range(incarnation.fragments[index].job.layout.shards):
            for part in incarnation.made_of(sync, index):
                record = done if part == sync else None
                if check_shard(incarnation, part, index, number, record) is None:
                    return False
    except ReloadError as reload:
        # If the rollback was there from the beginning, the record was lost, and the rollback was
        # written in its place.
        if reload.rollback is not None and reload.rollback.sync in recorded:
            return False
        raise
    except CorruptedObjectError as error:
        incarnation.say.error(
            "the state of fragment %d after sync %d is damaged: %s", index, sync, error
        )
        return False
    return True

"""Which of a run's complete states and syncs still count if the run has gone back to older states."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..._errors import CorruptedObjectError
from .._records._keys import commit_key, commit_sync
from .._records._records import Rollback
from .._records._rules import done_states, in_force
from .._repair import commit_again, readable_done

if TYPE_CHECKING:
    from .._life._life import Life
    from .._records._records import Commit


class History:
    """The complete states of every fragment, and the rollbacks that affect them.

    Args:
        life: The life that reads the store.

    Attributes:
        recorded: The numbers that have a record in the log. If a lower number is missing, its record is lost.
        rollbacks: The rollbacks that are known, in the order of the log, each with the digest of its record.
    """

    def __init__(self, life: Life) -> None:
        self._life = life
        self._done = done_states(life.store.list("state/"), len(life.fragments))
        self.recorded = _recorded(life)
        self.rollbacks = _rollbacks(life, self.recorded)

    @property
    def newest(self) -> list[int]:
        """For every fragment, the newest sync whose state is complete, whether it counts or not; 0 for the initial state."""
        return [max(syncs, default=0) for syncs in self._done]

    @property
    def newest_rollback(self) -> int:
        """Number of the newest rollback; 0 if none is known."""
        return self.rollbacks[-1][0].sync if self.rollbacks else 0

    def states(self, index: int) -> list[int]:
        """The syncs after which a fragment has a complete state that counts, the newest first; 0 (the initial state) is last."""
        known = [rollback for rollback, _ in self.rollbacks]
        return [
            sync
            for sync in sorted({0, *self._done[index]}, reverse=True)
            if in_force(sync, index, known)
        ]

    def given_up(self, states: list[int], last: int) -> list[int]:
        """The syncs up to ``last`` that count now, but would not count any more if the run continued from these states."""
        known = [rollback for rollback, _ in self.rollbacks]
        numbers = {rollback.sync for rollback in known}
        return [
            sync
            for sync in range(min(states) + 1, last + 1)
            if sync > states[self._life.index(sync)]
            and sync not in numbers
            and in_force(sync, self._life.index(sync), known)
        ]


def given_up_since(life: Life, sync: int, rollback: int) -> bool:
    """Whether the run has since given up something that a life held after a sync; also true if the log cannot tell any more.

    Args:
        life: The life that reads the log.
        sync: Number of the sync.
        rollback: Number of the newest rollback at that time.
    """
    number = life.rollback
    while number > rollback:
        try:
            entry = life.log(number)
        except CorruptedObjectError as error:
            life.say.error("%s", error)
            return True
        if entry is None or not isinstance(entry[0], Rollback):
            return True
        if sync >= min(entry[0].given_up, default=number):
            return True
        number = entry[0].rollback
    return number != rollback


def ends_in_log(life: Life) -> list[Rollback]:
    """The ends of a fixed run that the log holds, the newest first."""
    rollbacks = _rollbacks(life, _recorded(life))
    return [rollback for rollback, _ in reversed(rollbacks) if rollback.end is not None]


def close_gaps(life: Life, history: History) -> None:
    """Write a record for every number before the newest rollback whose record is lost, so that no life decides it once more.

    A sync that still counts gets the same record again, if the record of its state holds a copy. A sync that was given up gets a
    rollback to the states before it instead. The rollback that gave it up is newer, so no life begins from these states.
    """
    rollbacks = [rollback for rollback, _ in history.rollbacks]
    for lost in sorted(set(range(1, history.newest_rollback)) - history.recorded):
        index = life.index(lost)
        giving_up = next(
            (rollback for rollback in rollbacks if rollback.states[index] < lost < rollback.sync),
            None,
        )
        if life.store.peek(commit_key(lost)) is not None:
            continue  # the record is there: the listing was out of date
        if giving_up is None:
            commit_again(life, lost, None)
            continue
        count = len(life.fragments)
        states = tuple(
            min(state, _last_before(lost, index, count))
            for index, state in enumerate(giving_up.states)
        )
        previous = max((rollback.sync for rollback in rollbacks if rollback.sync < lost), default=0)
        closing = Rollback(lost, states, (), giving_up.fence, previous, run=life.run)
        life.say.error(
            "the record of sync %d is lost, and the run has given that sync up. Writing a rollback in its place, so "
            "that its number is not used again.",
            lost,
        )
        life.store.create(commit_key(lost), closing.to_json)


def _last_before(sync: int, index: int, count: int) -> int:
    """The last sync of a fragment before another sync; 0 if there is none."""
    return max(0, sync - 1 - (sync - 2 - index) % count)


def _recorded(life: Life) -> set[int]:
    return set(filter(None, map(commit_sync, life.store.list("commits/"))))


def _rollbacks(life: Life, recorded: set[int]) -> list[tuple[Rollback, str]]:
    """The rollbacks that can be read, in the order of the log.

    Every record names the newest rollback before it. So this goes from the end of the log back from one rollback to the next,
    and other records that are lost do not stop it. If a record cannot be read, the record before it is read instead.
    """
    newest = max(recorded, default=0)
    while life.store.peek(commit_key(newest + 1)) is not None:  # a listing may be out of date
        newest += 1
        recorded.add(newest)
    rollbacks: list[tuple[Rollback, str]] = []
    sync = newest
    while sync:
        record = _record(life, sync)
        if record is None:
            sync = max((number for number in recorded if number < sync), default=0)
            continue
        if isinstance(record[0], Rollback):
            rollbacks.append((record[0], record[1]))
        sync = record[0].rollback
    return rollbacks[::-1]


def _record(life: Life, sync: int) -> tuple[Commit | Rollback, str] | None:
    """A record of the log and its digest, or its copy in the record of the state (digest empty); None if neither can be read."""
    try:
        entry = life.log(sync)
    except CorruptedObjectError as error:
        life.say.error("%s", error)
        entry = None
    if entry is None:
        done = readable_done(life, sync, life.index(sync))
        if done is not None and done.commit is not None:
            return done.commit, ""
    return entry

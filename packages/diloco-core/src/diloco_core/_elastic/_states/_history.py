"""Which of a run's complete states and syncs still count, where the run has gone back to older states."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ..._errors import CorruptedObjectError
from .._log._keys import commit_key, commit_sync
from .._log._records import Rollback
from .._log._rules import done_states, in_force
from .._repair import commit_again, readable_done

if TYPE_CHECKING:
    from .._life._life import Life
    from .._log._records import Commit

_log = logging.getLogger("diloco_core")


class History:
    """The complete states of every fragment, and the rollbacks that bear on them.

    Args:
        life: Who reads it.

    Attributes:
        recorded: The numbers of which the log has records. Where one below another is not there, its record is lost.
        rollbacks: The rollbacks that are known, in the order of the log, each with the digest of its record.
    """

    def __init__(self, life: Life) -> None:
        self._life = life
        self._done = done_states(life.store.list("state/"), len(life.fragments))
        self.recorded = set(filter(None, map(commit_sync, life.store.list("commits/"))))
        self.rollbacks = _rollbacks(life, self.recorded)

    @property
    def newest(self) -> list[int]:
        """For every fragment, the newest sync whose state is complete, whether it counts or not (0: the initial one)."""
        return [max(syncs, default=0) for syncs in self._done]

    @property
    def newest_rollback(self) -> int:
        """Number of the newest rollback; 0 where none is known."""
        return self.rollbacks[-1][0].sync if self.rollbacks else 0

    def states(self, index: int) -> list[int]:
        """After which syncs there is a complete state of a fragment that counts, the newest first; at last the initial one."""
        known = [rollback for rollback, _ in self.rollbacks]
        return [
            sync
            for sync in sorted({0, *self._done[index]}, reverse=True)
            if in_force(sync, index, known)
        ]

    def given_up(self, states: list[int], last: int) -> list[int]:
        """The syncs up to ``last`` that still count, and do not any more if the run goes on from these states."""
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
    """Whether something that a life held after a sync was given up since; also where the log does not tell any more.

    Args:
        life: Who reads the log.
        sync: Number of the sync.
        rollback: Number of the newest rollback that the life had taken part in.
    """
    number = life.rollback
    while number > rollback:
        try:
            entry = life.log(number)
        except CorruptedObjectError as error:
            _log.error("rank %d: %s", life.rank, error)
            return True
        if entry is None or not isinstance(entry[0], Rollback):
            return True
        if sync >= min(entry[0].given_up, default=number):
            return True
        number = entry[0].rollback
    return number != rollback


def close_gaps(life: Life, history: History) -> None:
    """Give every number before the newest rollback a record again whose own is lost, so that nobody decides it once more.

    A sync that still counts gets the same record again, where its state knows what it said. In place of one that was given
    up there is a rollback to the states before it; the one that gave it up is newer, so nobody begins from these.
    """
    rollbacks = [rollback for rollback, _ in history.rollbacks]
    for lost in sorted(set(range(1, history.newest_rollback)) - history.recorded):
        index = life.index(lost)
        giving_up = next((r for r in rollbacks if r.states[index] < lost < r.sync), None)
        if life.store.get(commit_key(lost)) is not None:
            continue  # the listing was old
        if giving_up is None:
            commit_again(life, lost, None)
            continue
        count = len(life.fragments)
        states = tuple(
            min(state, _last_before(lost, index, count))
            for index, state in enumerate(giving_up.states)
        )
        before = max((rollback.sync for rollback in rollbacks if rollback.sync < lost), default=0)
        closing = Rollback(lost, states, (), giving_up.fence, before, run=life.run)
        _log.error(
            "rank %d: the record of sync %d is lost, and that was given up: closing its number",
            life.rank,
            lost,
        )
        life.store.create(commit_key(lost), closing.to_json)


def _last_before(sync: int, index: int, count: int) -> int:
    """The last sync of a fragment before another sync; 0 where there is none."""
    return max(0, sync - 1 - (sync - 2 - index) % count)


def _rollbacks(life: Life, recorded: set[int]) -> list[tuple[Rollback, str]]:
    """The rollbacks that can be read, in the order of the log.

    Every record names the newest rollback before it, so the way leads from the end of the log from one to the next, and a
    record that is lost does not end it. Where one cannot be read, the record before it is read instead.
    """
    newest = max(recorded, default=0)
    while life.store.get(commit_key(newest + 1)) is not None:  # a listing may be old
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
    try:
        entry = life.log(sync)
    except CorruptedObjectError as error:
        _log.error("rank %d: %s", life.rank, error)
        entry = None
    if entry is None:
        done = readable_done(life, sync, life.index(sync))
        if done is not None and done.commit is not None:
            return done.commit, ""
    return entry

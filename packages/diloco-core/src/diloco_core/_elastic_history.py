"""Which of a run's complete states and syncs still count, where the run has gone back to older states."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ._elastic_records import Rollback, commit_key
from ._elastic_rules import done_states, in_force
from ._errors import CorruptedObjectError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ._elastic_life import Life

_log = logging.getLogger("diloco_core")


class History:
    """The complete states of every fragment, and the rollbacks that bear on them.

    The log is read no further back than the states that are asked for.

    Args:
        life: Who reads it.

    Attributes:
        rollbacks: The rollbacks that are known, in the order of the log, each with the digest of its record.
    """

    def __init__(self, life: Life) -> None:
        self._life = life
        self._done = done_states(life.store.list("state/"), len(life.fragments))
        self._from = min(self.newest)
        self.rollbacks = list(_rollbacks(life, self._from))

    @property
    def newest(self) -> list[int]:
        """For every fragment, the newest sync whose state is complete, whether it counts or not (0: the initial one)."""
        return [max(syncs, default=0) for syncs in self._done]

    @property
    def newest_rollback(self) -> int:
        """Number of the newest rollback; 0 where none is known."""
        return self.rollbacks[-1][0].sync if self.rollbacks else 0

    def states(self, index: int) -> Iterator[int]:
        """After which syncs there is a complete state of a fragment that counts, the newest first; at last the initial one."""
        for sync in sorted({0, *self._done[index]}, reverse=True):
            if self._counts(sync, index):
                self._look_back(sync)
                if self._counts(sync, index):
                    yield sync

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

    def _counts(self, sync: int, index: int) -> bool:
        return in_force(sync, index, [rollback for rollback, _ in self.rollbacks])

    def _look_back(self, sync: int) -> None:
        if sync < self._from:
            self.rollbacks[:0] = _rollbacks(self._life, sync, self._from)
            self._from = sync


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
            found = life.log(number)
        except CorruptedObjectError as error:
            _log.error("rank %d: %s", life.rank, error)
            return True
        if found is None or not isinstance(found[0], Rollback):
            return True
        if sync >= min(found[0].given_up, default=number):
            return True
        number = found[0].rollback
    return number != rollback


def _rollbacks(life: Life, after: int, last: int | None = None) -> Iterator[tuple[Rollback, str]]:
    """The rollbacks in the log after a sync, up to ``last`` or to its end.

    One that cannot be read is left out: either a newer one takes its place, or replaying the log comes to it and says so.
    """
    sync = after
    while last is None or sync < last:
        sync += 1
        data = life.store.get(commit_key(sync))
        if data is None:
            if last is None:
                return
            continue
        if b'"kind": "commit"' in data[:40]:
            continue
        try:
            found = life.log(sync)
        except CorruptedObjectError as error:
            _log.error("rank %d: %s", life.rank, error)
            continue
        if found is not None and isinstance(found[0], Rollback):
            yield found[0], found[1]

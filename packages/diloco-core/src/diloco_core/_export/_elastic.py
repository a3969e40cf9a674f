"""Where the published states of an elastic run lie: its records say it."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, TypeVar

from .._elastic._life._progress import published_seed
from .._elastic._log._keys import Delta, Hint, commit_key, commit_sync, done_key, shard_key
from .._elastic._log._records import Commit, Done, Rollback, of_run, read_record
from .._elastic._log._rules import done_states
from .._elastic._log._rules import states as published_states
from .._errors import CorruptedObjectError, ObjectNotFoundError, RunExistsError
from ._source import PublishedFile, outer_steps, state

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .._elastic._log._records import Manifest
    from .._store._api import Store

T = TypeVar("T", bound="Commit | Rollback | Done")

_log = logging.getLogger("diloco_core")


class ElasticSource:
    """An elastic run: its records say what is complete, and what was given up.

    Attributes:
        unknown: Number of the newest rollback whose record cannot be read, as of the last call of :meth:`complete`; 0 if all
            can. Which older states were given up is not known then, so they count as not there.
    """

    first = 0

    def __init__(self, store: Store, manifest: Manifest) -> None:
        self.rollbacks: Sequence[Rollback] = []
        self.unknown = 0
        self.run_id = manifest.run_id
        self.fragments = manifest.fragments
        self.unsynced = manifest.unsynced
        self._store = store
        self._manifest = manifest
        self._run = manifest.run()

    def complete(self) -> list[set[int]]:
        """For every fragment, after which syncs its state is completely published, and was not given up."""
        self.rollbacks = self._read_rollbacks()
        complete = done_states(self._store.list("state/"), len(self.fragments), self.rollbacks)
        initial = self._store.list(f"initial/{self._manifest.initial}/")
        for index, syncs in enumerate(complete):
            if all(file.key in initial for file in self.files(index, 0)):
                syncs.add(0)
        if self.unknown:  # which of the states before that were given up, nobody can tell
            complete = [{sync for sync in syncs if sync > self.unknown} for syncs in complete]
        return complete

    def outer_steps(self, number: int) -> int:
        """How many outer steps the model had taken after a number of the log."""
        if not self.unknown:
            return outer_steps(self, number)
        # How many syncs were given up is not known, but every record of one that counts says how many do.
        steps = 0
        for sync in state(self, number):
            try:
                record = self._record(sync)
            except ObjectNotFoundError as error:
                raise CorruptedObjectError(
                    f"{self._store.uri}/{commit_key(sync)} is gone"
                ) from error
            if isinstance(record, Rollback):
                raise CorruptedObjectError(f"{self._store.uri}/{commit_key(sync)} is of no sync")
            steps += record.outer_steps
        return steps

    def files(self, index: int, sync: int) -> list[PublishedFile]:
        """The shards of a fragment's state after a sync."""
        initial = self._manifest.initial
        done = self._done(sync, index) if sync else self._manifest.done(index)
        of = self._run if sync else initial
        where = self.fragments[index]["fingerprint"], of, sync, "values"
        return [
            PublishedFile(
                shard_key(sync, index, number, initial), published_seed(*where, number), checksum
            )
            for number, checksum in enumerate(done.sums)
        ]

    def expected(self) -> list[int]:
        """Numbers of the log whose states must once have been there, or are just being published; the newest first."""
        listing = self._store.list("state/")
        traces = {sync for sync, _ in published_states(listing)}
        committed = {sync for sync in map(commit_sync, self._store.list("commits/")) if sync}
        deltas = self._store.list("deltas/")
        # Who contributes to a sync, or joins in it, has the state before it.
        committed |= {delta.sync - 1 for delta in map(Delta.parse, deltas) if delta}
        hints = [hint for hint in map(Hint.parse, deltas) if hint]
        committed |= {hint.sync - 1 for hint in hints if hint.event == "join"}
        left: dict[tuple[int, int], int] = {}
        for hint in hints:
            if (
                hint.event == "leave"
            ):  # a life that fails names two syncs: it stands before the first
                life = hint.rank, hint.epoch
                left[life] = min(hint.sync - 1, left.get(life, hint.sync))
        last = max({0}.union(traces, committed, left.values()))
        ended = last in left.values()
        numbers = set(range(last + 1))
        if self._manifest.topology == "gather":
            # Most syncs are not published, and others are called complete two rounds later. Who leaves makes up for it.
            begun = {0, *traces}
            settled = last if ended else last - 2 * len(self.fragments) - 1
            numbers = {
                number
                for number in begun
                if number <= settled and begun.issuperset(state(self, number))
            }
            numbers |= {last} if ended else set()
        obsolete = {
            sync for rollback in self.rollbacks for sync in (rollback.sync, *rollback.given_up)
        }
        return sorted(
            (number for number in numbers - obsolete if number > self.unknown), reverse=True
        )

    def missing(self, index: int, sync: int) -> list[str]:
        """Keys that a fragment's state after a sync is made of, and that are not there."""
        initial = self._manifest.initial
        shards = range(self.fragments[index]["shards"])
        keys = [shard_key(sync, index, number, initial) for number in shards]
        keys += [done_key(sync, index)] if sync else []
        listing = self._store.list(f"state/{sync:08}/" if sync else f"initial/{initial}/")
        return [key for key in keys if key not in listing]

    def _read_rollbacks(self) -> list[Rollback]:
        """All that can be read, the oldest first. Every record of the log names the newest rollback before it."""
        rollbacks: list[Rollback] = []
        self.unknown = 0
        following: int | None = (
            None  # which record is to be read next; None: the newest before `limit` that can be read
        )
        limit = sys.maxsize
        listed = sorted(filter(None, map(commit_sync, self._store.list("commits/"))), reverse=True)
        while following != 0:
            sync = following or next((number for number in listed if number < limit), 0)
            if not sync:
                break
            limit = sync
            try:
                record = self._record(sync)
            except (CorruptedObjectError, ObjectNotFoundError) as error:
                if following:
                    self.unknown = sync
                    break
                _log.warning(
                    "%s. What it says is left out of account: the record before it is read instead.",
                    error,
                )
                continue
            if isinstance(record, Rollback):
                rollbacks.append(record)
            following = record.rollback
        return rollbacks[::-1]

    def _record(self, sync: int) -> Commit | Rollback:
        key, fragment = commit_key(sync), (sync - 1) % len(self.fragments)
        origin = f"{self._store.uri}/{key}"
        try:
            return self._own(read_record(self._store.get(key), sync, origin), origin)
        except (CorruptedObjectError, ObjectNotFoundError):
            if done_key(sync, fragment) not in self._store.list(f"state/{sync:08}/"):
                raise
            commit = self._done(sync, fragment).commit
            if commit is None:
                raise
            return commit

    def _done(self, sync: int, index: int) -> Done:
        key = done_key(sync, index)
        origin = f"{self._store.uri}/{key}"
        return self._own(Done.from_json(self._store.get(key), sync, index, origin), origin)

    def _own(self, record: T, origin: str) -> T:
        """A record of this run. Here, one of another run is like a damaged one: there may be an older state that is whole."""
        try:
            return of_run(record, self._run, origin)
        except RunExistsError as error:
            raise CorruptedObjectError(str(error)) from error

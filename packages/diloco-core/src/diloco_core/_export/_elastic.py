"""Where the published states of an elastic run are, according to its records."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, TypeVar

from .._elastic._life._progress import published_seed
from .._elastic._records._keys import Delta, Hint, commit_key, commit_sync, done_key, shard_key
from .._elastic._records._records import Commit, Done, Rollback, of_run, read_record
from .._elastic._records._rules import done_states
from .._elastic._records._rules import states as published_states
from .._errors import CorruptedObjectError, ObjectNotFoundError, RunExistsError
from ._source import PublishedFile, outer_steps, state

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .._elastic._records._manifest import Manifest
    from .._store._api import Store

T = TypeVar("T", bound="Commit | Rollback | Done")

_log = logging.getLogger("diloco_core")


class ElasticSource:
    """The published states of an elastic run: its records say which are complete, and which were given up.

    Attributes:
        unknown: Number of the newest rollback whose record cannot be read, as of the last call of :meth:`complete`; 0 if all
            can. It is then not known which of the states before it were given up, so all of them are left out.
    """

    initial_steps = 0

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
        """For each fragment, the syncs after which its state is completely published, and was not given up."""
        self.rollbacks = self._read_rollbacks()
        complete = done_states(self._store.list("state/"), len(self.fragments), self.rollbacks)
        initial = self._store.list(f"initial/{self._manifest.initial}/")
        for index, syncs in enumerate(complete):
            if all(file.key in initial for file in self.files(index, 0)):
                syncs.add(0)
        if self.unknown:  # it is not known which of the states before it were given up
            complete = [{sync for sync in syncs if sync > self.unknown} for syncs in complete]
        return complete

    def outer_steps(self, number: int) -> int:
        """The number of outer steps that the model had taken after a number of the log."""
        if not self.unknown:
            return outer_steps(self, number)
        # It is not known how many syncs were given up, but each record of a sync says how many outer steps counted up to it.
        steps = 0
        for sync in state(self, number):
            try:
                record = self._record(sync)
            except ObjectNotFoundError as error:
                raise CorruptedObjectError(
                    f"{self._store.uri}/{commit_key(sync)} is gone"
                ) from error
            if isinstance(record, Rollback):
                raise CorruptedObjectError(
                    f"{self._store.uri}/{commit_key(sync)} is the record of a rollback, not of a sync"
                )
            steps += record.outer_steps
        return steps

    def files(self, index: int, sync: int) -> list[PublishedFile]:
        """The shards of a fragment's state after a sync."""
        initial = self._manifest.initial
        done = self._done(sync, index) if sync else self._manifest.done(index)
        run = self._run if sync else initial
        seed_parts = self.fragments[index]["fingerprint"], run, sync, "values"
        return [
            PublishedFile(
                shard_key(sync, index, number, initial),
                published_seed(*seed_parts, number),
                checksum,
                number,
            )
            for number, checksum in enumerate(done.sums)
        ]

    def expected(self) -> list[int]:
        """Numbers of the log whose states must have been published once, or are being published now; the newest first."""
        listing = self._store.list("state/")
        traces = {sync for sync, _ in published_states(listing)}
        committed = {sync for sync in map(commit_sync, self._store.list("commits/")) if sync}
        deltas = self._store.list("deltas/")
        # A replica that contributes to a sync, or joins in it, has the state before it.
        committed |= {delta.sync - 1 for delta in map(Delta.parse, deltas) if delta}
        hints = [hint for hint in map(Hint.parse, deltas) if hint]
        committed |= {hint.sync - 1 for hint in hints if hint.event == "join"}
        left: dict[tuple[int, int], int] = {}
        for hint in hints:
            if hint.event == "leave":
                # A life that fails names two syncs; it has the state before the first of them.
                life = hint.rank, hint.epoch
                left[life] = min(hint.sync - 1, left.get(life, hint.sync))
        newest = max({0}.union(traces, committed, left.values()))
        has_ended = newest in left.values()
        numbers = set(range(newest + 1))
        if self._manifest.topology == "gather":
            # Most syncs are not published, and a state that is published has its record of completion two rounds later. Only a
            # replica that leaves publishes the last state at once.
            begun = {0, *traces}
            settled = newest if has_ended else newest - 2 * len(self.fragments) - 1
            numbers = {
                number
                for number in begun
                if number <= settled and begun.issuperset(state(self, number))
            }
            numbers |= {newest} if has_ended else set()
        obsolete = {
            sync for rollback in self.rollbacks for sync in (rollback.sync, *rollback.given_up)
        }
        return sorted(
            (number for number in numbers - obsolete if number > self.unknown), reverse=True
        )

    def missing(self, index: int, sync: int) -> list[str]:
        """Keys of the objects that are missing from a fragment's state after a sync."""
        initial = self._manifest.initial
        shards = range(self.fragments[index]["shards"])
        keys = [shard_key(sync, index, number, initial) for number in shards]
        keys += [done_key(sync, index)] if sync else []
        listing = self._store.list(f"state/{sync:08}/" if sync else f"initial/{initial}/")
        return [key for key in keys if key not in listing]

    def _read_rollbacks(self) -> list[Rollback]:
        """All rollbacks that can be read, the oldest first. Each record of the log names the newest rollback before it."""
        rollbacks: list[Rollback] = []
        self.unknown = 0
        # The record to read next; None stands for the newest one before `limit` that can be read.
        following: int | None = None
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
                    "%s This record is ignored, and the one before it is read instead.",
                    str(error).rstrip(".") + ".",
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
            return self._of_this_run(read_record(self._store.get(key), sync, origin), origin)
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
        return self._of_this_run(Done.from_json(self._store.get(key), sync, index, origin), origin)

    def _of_this_run(self, record: T, origin: str) -> T:
        """The record, if it belongs to this run. One of another run counts as damaged, since an older state may be whole."""
        try:
            return of_run(record, self._run, origin)
        except RunExistsError as error:
            raise CorruptedObjectError(str(error)) from error

"""Where the published states of a strict run are: a state is complete when all of its shards are there."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from .._errors import CorruptedObjectError, FormatError, ObjectNotFoundError
from .._outer._initial import initial_fingerprint
from .._strict._records import committed_sync, note_key, noted, read_note
from .._strict._sync._objects import state_key
from .._wire._sections import fingerprint, seed
from ._source import PublishedFile

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .._elastic._log._records import Rollback
    from .._store._api import Store


_SHARD = re.compile(r"state/(\d{8})/\d{5}\.([0-9a-f]{16})\.safetensors", re.ASCII)


class StrictSource:
    """The published states of a strict run. No record says which are complete: those are whose shards are all there."""

    def __init__(self, store: Store, manifest: Mapping[str, Any]) -> None:
        self.rollbacks: Sequence[Rollback] = []
        self.unknown = 0
        self.run_id = manifest["run_id"]
        self._run = manifest["run"]
        self.fragments = manifest["fragments"]
        self.unsynced = manifest.get("unsynced", {})
        self.initial_steps = int(manifest["settings"]["committed"])
        self._store = store

    def complete(self) -> list[set[int]]:
        """For each fragment, the syncs after which its state is completely published, and was not given up."""
        count = len(self.fragments)
        listing = self._store.list("state/")
        complete: list[set[int]] = [set() for _ in range(count)]
        for sync in self._published(listing):
            step = self._step(sync)
            index = sync if sync < count else (step - 1) % count
            if all(
                state_key(self._run, sync, number) in listing
                for number in range(self.fragments[index]["shards"])
            ):
                complete[index].add(step)
        return complete

    def outer_steps(self, number: int) -> int:
        """The number of outer steps that the model had taken after a number of the log: the number itself."""
        return number

    def files(self, index: int, sync: int) -> list[PublishedFile]:
        """The shards of a fragment's state after a sync."""
        table = self.fragments[index]
        job_fingerprint = table["fingerprint"]
        # The numbers in the store also count the syncs of the initial values.
        stored_sync = (
            index
            if sync == self.initial_steps
            else sync - self.initial_steps + len(self.fragments) - 1
        )
        if sync == self.initial_steps:
            job_fingerprint = initial_fingerprint(job_fingerprint)
        identity = fingerprint(self._run, job_fingerprint)
        return [
            PublishedFile(
                state_key(self._run, stored_sync, number),
                seed(identity, stored_sync, "values", number),
            )
            for number in range(table["shards"])
        ]

    def expected(self) -> list[int]:
        """Numbers of the log whose states must have been published once, or are being published now; the newest first."""
        syncs = self._published(self._store.list("state/"))
        committed = filter(None, map(committed_sync, self._store.list("commits/")))
        syncs |= {sync for run, sync in committed if run == self._run[:16]}
        # The note of a replica that has ended says how many syncs it has finished.
        syncs |= {
            finished - 1
            for finished in map(self._finished, noted(self._store.list("notes/")))
            if finished
        }
        return list(range(self._step(max(syncs)), self.initial_steps, -1)) if syncs else []

    def missing(self, index: int, sync: int) -> list[str]:
        """Keys of the objects that are missing from a fragment's state after a sync."""
        keys = [file.key for file in self.files(index, sync)]
        listing = self._store.list("state/")
        return [key for key in keys if key not in listing]

    def _step(self, sync: int) -> int:
        """The number of outer steps after a sync; the first sync of each fragment only shares the initial values."""
        return self.initial_steps + max(0, sync + 1 - len(self.fragments))

    def _finished(self, rank_and_life: tuple[int, int]) -> int:
        rank, life = rank_and_life
        key = note_key(rank, life)
        try:
            ending, _ = read_note(self._store.get(key), rank, f"{self._store.uri}/{key}", life)
        except (CorruptedObjectError, FormatError, ObjectNotFoundError):
            return 0  # the note is only one of several sources
        return ending.progress.number

    def _published(self, listing: Mapping[str, int]) -> set[int]:
        """The syncs of which at least one shard is published."""
        shards = filter(None, map(_SHARD.fullmatch, listing))
        return {int(match[1]) for match in shards if match[2] == self._run[:16]}

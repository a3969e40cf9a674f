"""Where the published states of a strict run are: a state is complete when all of its shards are there.

Of a run that was resumed, the states of those syncs are exported that its newest manifest names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._errors import CorruptedObjectError, FormatError, ObjectNotFoundError
from .._outer._initial import initial_fingerprint
from .._strict._records import committed_sync, note_key, read_note
from .._strict._resume._choice import keys_of
from .._strict._sync._objects import shards_listed
from .._wire._sections import fingerprint, seed
from ._source import PublishedFile

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .._elastic._log._records import Rollback
    from .._store._api import Store
    from .._strict._manifest import Manifest


class StrictSource:
    """The published states of a strict run. No record says which are complete: those are whose shards are all there."""

    def __init__(self, store: Store, manifest: Manifest) -> None:
        self.rollbacks: Sequence[Rollback] = []
        self.unknown = 0
        self.run_id = manifest.run_id
        self.fragments = manifest.fragments
        self.unsynced = manifest.unsynced
        self.initial_steps = manifest.initial_steps
        self._manifest = manifest
        self._store = store

    def complete(self) -> list[set[int]]:
        """For each fragment, the syncs after which its state is completely published, and was not given up."""
        listing = self._store.list("state/")
        complete: list[set[int]] = [set() for _ in self.fragments]
        for sync in self._published(listing):
            index = self._manifest.fragment_of(sync)
            if all(key in listing for key in keys_of(self._manifest, index, sync)):
                complete[index].add(self._manifest.outer_steps(sync))
        return complete

    def outer_steps(self, number: int) -> int:
        """The number of outer steps that the model had taken after a number of the log: the number itself."""
        return number

    def files(self, index: int, sync: int) -> list[PublishedFile]:
        """The shards of a fragment's state after a sync."""
        job_fingerprint = self.fragments[index]["fingerprint"]
        stored_sync = self._stored_sync(index, sync)
        if sync == self.initial_steps:
            job_fingerprint = initial_fingerprint(job_fingerprint)
        identity = fingerprint(self._manifest.run_of(stored_sync), job_fingerprint)
        return [
            PublishedFile(key, seed(identity, stored_sync, "values", number))
            for number, key in enumerate(keys_of(self._manifest, index, stored_sync))
        ]

    def expected(self) -> list[int]:
        """Numbers of the log whose states must have been published once, or are being published now; the newest first."""
        syncs = self._published(self._store.list("state/"))
        committed = filter(None, map(committed_sync, self._store.list("commits/")))
        syncs |= {sync for run, sync in committed if self._counts(run, sync)}
        # The note of a replica that has ended says how many syncs it has finished.
        syncs |= {finished - 1 for finished in map(self._finished, self._members()) if finished}
        steps = self._manifest.outer_steps(max(syncs)) if syncs else self.initial_steps
        return list(range(steps, self.initial_steps, -1)) if syncs else []

    def missing(self, index: int, sync: int) -> list[str]:
        """Keys of the objects that are missing from a fragment's state after a sync."""
        keys = [file.key for file in self.files(index, sync)]
        listing = self._store.list("state/")
        return [key for key in keys if key not in listing]

    def _stored_sync(self, index: int, sync: int) -> int:
        """The number of a sync in the store, where the syncs of the initial values have numbers, too."""
        if sync == self.initial_steps:
            return index
        return sync - self.initial_steps + len(self.fragments) - 1

    def _members(self) -> list[tuple[int, int, str]]:
        members = enumerate(self._manifest.members)
        return [(rank, life, nonce) for rank, (life, nonce) in members]

    def _finished(self, member: tuple[int, int, str]) -> int:
        rank, life, nonce = member
        key = note_key(rank, life)
        try:
            ending, writer = read_note(self._store.get(key), rank, f"{self._store.uri}/{key}", life)
        except (CorruptedObjectError, FormatError, ObjectNotFoundError):
            return 0  # the note is only one of several sources
        return ending.progress.number if writer == nonce else 0

    def _published(self, listing: Mapping[str, int]) -> set[int]:
        """The syncs of which at least one shard is published."""
        return {sync for run, sync in shards_listed(listing) if self._counts(run, sync)}

    def _counts(self, run: str, sync: int) -> bool:
        """Whether the sync of a life, of whose name only the beginning is known, counts."""
        return self._manifest.run_of(sync).startswith(run)

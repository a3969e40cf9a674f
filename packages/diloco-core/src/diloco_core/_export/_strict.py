"""Where the published states of a strict run are: a state is complete when all of its shards are there.

Of a run that was resumed, the states of those syncs are exported that its newest manifest names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._errors import ObjectNotFoundError
from .._outer._initial import initial_fingerprint
from .._strict._states import (
    committed_syncs,
    finished_syncs,
    keys_of,
    missing_shards,
    published_syncs,
)
from .._wire._sections import fingerprint, seed
from ._source import PublishedFile, state_codec, written

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .._arithmetic._full_states import FullStates
    from .._elastic._records._records import Rollback
    from .._store._api import Store
    from .._strict._records._manifest import Manifest


class StrictSource:
    """The published states of a strict run.

    No record says which of them are complete: a state is complete when all of its shards are there.
    """

    def __init__(self, store: Store, manifest: Manifest) -> None:
        self.rollbacks: Sequence[Rollback] = []
        self.unknown = self.newest = 0
        self.seldom = False
        self.run_id = manifest.run_id
        self.fragments = manifest.fragments
        self.unsynced = manifest.unsynced
        self.initial_steps = manifest.initial_steps
        self._manifest = manifest
        self._store = store
        self._codec = state_codec(manifest.settings, store.uri)

    def complete(self) -> list[set[int]]:
        """For each fragment, the syncs after which its state is completely published, and was not given up."""
        listing = self._store.list("state/")
        complete: list[set[int]] = [set() for _ in self.fragments]
        for sync in published_syncs(self._manifest, listing):
            index = self._manifest.fragment_of(sync)
            if not missing_shards(self._manifest, index, sync, listing):
                complete[index].add(self._manifest.outer_steps(sync))
        return complete

    def outer_steps(self, number: int) -> int:
        """The number of outer steps that the model had taken after a number of the log: the number itself."""
        return number

    def files(self, index: int, sync: int) -> list[PublishedFile]:
        """The files that hold a fragment's state after a sync: the newest whole one, and the updates since."""
        full = self._manifest.full_states(index)
        return [
            file
            for needed in full.needed(self._stored_sync(index, sync))
            for file in self._files_of(index, needed, full)
        ]

    def _files_of(self, index: int, stored_sync: int, full: FullStates) -> Iterator[PublishedFile]:
        job_fingerprint = self.fragments[index]["fingerprint"]
        if stored_sync < len(self.fragments):
            job_fingerprint = initial_fingerprint(job_fingerprint)
        identity = fingerprint(self._manifest.run_of(stored_sync), job_fingerprint)
        codec = None if full.is_full(stored_sync) else self._codec
        for number, key in enumerate(keys_of(self._manifest, index, stored_sync)):
            values_seed = seed(identity, stored_sync, "values", number)
            update = (codec, seed(identity, stored_sync, "update", number)) if codec else None
            yield PublishedFile(key, values_seed, shard=number, update=update)

    def expected(self) -> Iterator[int]:
        """Numbers of the log whose states must have been published once, or are being published now; the newest first."""
        manifest, store = self._manifest, self._store
        syncs = published_syncs(manifest, written(store.list("state/")))
        syncs |= committed_syncs(manifest, written(store.list("commits/")))
        finished = finished_syncs(manifest, store.uri, self._read)
        syncs |= {number - 1 for number in finished if number}
        steps = manifest.outer_steps(max(syncs)) if syncs else self.initial_steps
        self.newest = steps
        # Not a list of them: the newest number may be in the name of an object that the run has not written.
        return iter(range(steps, self.initial_steps, -1))

    def missing(self, index: int, sync: int) -> list[str]:
        """Keys of the objects that are missing from a fragment's state after a sync."""
        stored_sync = self._stored_sync(index, sync)
        return missing_shards(self._manifest, index, stored_sync, self._store.list("state/"))

    def _stored_sync(self, index: int, sync: int) -> int:
        """The number of a sync in the store, where the syncs of the initial values have numbers, too."""
        if sync == self.initial_steps:
            return index
        return sync - self.initial_steps + len(self.fragments) - 1

    def _read(self, key: str) -> bytes | None:
        try:
            return self._store.get(key)
        except ObjectNotFoundError:
            return None

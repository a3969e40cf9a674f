"""Reading the published state of a run that is resumed: checking every byte of it, and loading it."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ..._errors import CorruptedObjectError
from ..._exchange._resumable import TakenUp
from ..._store._ahead import open_ahead
from .._states import keys_of
from .._sync._adopt import read_shard
from .._sync._objects import SyncObjects, own_contributions, own_shards
from ._base import GO_BACK

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..._arithmetic._sync_job import SyncJob
    from ..._exchange._resumable import ResumableJob
    from ..._store._api import ObjectReader
    from ..._wire._published import Shard
    from .._manifest import Manifest
    from .._participant import Participant

_log = logging.getLogger("diloco_core")


class Loader:
    """Reads states of a run into the fragments of one replica. Not thread-safe.

    Args:
        participant: This replica, which need not know the run's ``earlier`` names yet.
        jobs: All fragments.
        initial: The first sync of each fragment.
    """

    def __init__(
        self,
        participant: Participant,
        jobs: Sequence[ResumableJob],
        initial: Sequence[SyncJob],
    ) -> None:
        self._participant = participant
        self._jobs = jobs
        self._initial = initial

    def is_whole(self, manifest: Manifest, sync: int, listing: dict[str, int]) -> bool:
        """Whether every byte of a state is as it was written; logs what is not."""

        def check(shard: Shard, _: ResumableJob, reader: ObjectReader, origin: str) -> None:
            shard.check(reader, origin, self._participant.scratch, whole=True)

        try:
            self._read(manifest, sync, listing, check)
        except CorruptedObjectError as error:
            _log.error(
                "the state after outer step %d cannot be used: %s",
                manifest.outer_steps(sync),
                error,
            )
            return False
        return True

    def load(self, manifest: Manifest) -> tuple[TakenUp, list[str], list[list[str]]]:
        """Load the state that the manifest names.

        Returns:
            Where the run stands; keys of this rank that are no longer needed when all replicas have loaded it; and the keys
            that its last syncs have superseded (:class:`.OldStates`).

        Raises:
            CorruptedObjectError: The state is damaged.
        """
        participant = self._participant
        rank = participant.rank
        _, sync = manifest.earlier[-1]
        listing = participant.store.list("state/")
        counted = [0] * len(self._jobs)
        numbers = {job.name: number for number, job in enumerate(self._jobs)}

        def load(shard: Shard, job: ResumableJob, reader: ObjectReader, origin: str) -> None:
            if participant.owner(shard.number) == rank:
                metadata, chunks, scalars = shard.described(reader, origin)
                # Before its first outer step a fragment has outer state only if the outer loop was loaded when the run began.
                if scalars or any(chunks.values()):
                    job.install_outer(chunks, scalars)
                counted[numbers[job.name]] = _steps(metadata.get("steps"), origin)
            shard.adopt(reader, origin, participant.scratch)

        try:
            self._read(manifest, sync, listing, load)
        except CorruptedObjectError as error:
            raise CorruptedObjectError(
                f"{str(error).rstrip('.')}. The state after outer step {manifest.outer_steps(sync)}, which the run was to "
                f"continue from, is damaged. {GO_BACK}"
            ) from error
        syncs = manifest.last_syncs(sync)
        kept = {key for index, last in enumerate(syncs) for key in keys_of(manifest, index, last)}
        previous = [self._superseded(manifest, last) for last in sorted(syncs)]
        kept.update(*previous)
        obsolete = [
            *(key for key in own_shards(listing, rank, manifest.world_size) if key not in kept),
            *own_contributions(participant.store.list("deltas/"), rank, participant.run),
        ]
        taken = TakenUp(manifest.outer_steps(sync), max(counted), syncs, counted)
        return taken, obsolete, previous

    def _superseded(self, manifest: Manifest, sync: int) -> list[str]:
        """Keys of the shards of this rank in whose place a sync has put newer ones."""
        if sync < len(self._jobs):
            return []
        index = manifest.fragment_of(sync)
        # Not always as many syncs before as there are fragments: a run that was begun with a loaded outer loop may have begun in
        # the middle of the turns.
        keys = keys_of(manifest, index, manifest.last_syncs(sync - 1)[index])
        return own_shards(keys, self._participant.rank, manifest.world_size)

    def _read(
        self,
        manifest: Manifest,
        sync: int,
        listing: dict[str, int],
        use: Callable[[Shard, ResumableJob, ObjectReader, str], object],
    ) -> None:
        """Call ``use`` with each shard of a state, its fragment, and its open file."""
        participant, count = self._participant, len(self._jobs)
        shards: dict[str, Shard] = {}
        fragments: dict[str, ResumableJob] = {}
        for index, last in enumerate(manifest.last_syncs(sync)):
            job = self._initial[index] if last < count else self._jobs[index]
            of_run = replace(participant, run=manifest.run_of(last))
            objects = SyncObjects(of_run, last, job)
            for number in range(job.layout.shards):
                key = objects.state_key(number)
                shards[key] = objects.shard(number)
                fragments[key] = self._jobs[index]

        def announce(key: str, reader: ObjectReader) -> None:
            shards[key].announce(reader, key)

        sizes = {key: listing.get(key) for key in shards}
        store = participant.store
        with open_ahead(store.store, sizes, announce) as readers:
            for (key, shard), reader in zip(shards.items(), readers, strict=True):
                act = partial(use, shard, fragments[key])
                read_shard(
                    participant, key, reader, act, "is gone: something deletes objects there"
                )


def _steps(text: str | None, origin: str) -> int:
    if text is None or not text.isdecimal():
        raise CorruptedObjectError(f"the header of {origin} does not say how many steps it counts")
    return int(text)

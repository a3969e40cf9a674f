"""Reading the published state of a run that is resumed: checking every byte of it, and loading it."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from ..._arithmetic._rate import Rate
from ..._errors import CorruptedObjectError
from ..._exchange._resumable import TakenUp
from ..._store._ahead import open_ahead
from ..._store._copies import copy_key
from .._states import needed_keys
from .._sync._adopt import read_shard
from .._sync._objects import SyncObjects, own_contributions, own_shards
from ._base import GO_BACK

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from ..._arithmetic._sync_job import SyncJob
    from ..._exchange._resumable import ResumableJob
    from ..._store._api import ObjectReader
    from ..._wire._published import Shard
    from .._participant import Participant
    from .._records._manifest import Manifest

_GONE = "is gone: something deletes objects there"
_log = logging.getLogger("diloco_core")


@dataclass(frozen=True, slots=True)
class _Part:
    """One shard of a state.

    Attributes:
        key: Its key.
        shard: How it is read.
        index: The number of its fragment.
        has_copy: Whether it is of the fragment's first state, of which there are copies.
        newest: Whether no later update of the fragment follows.
    """

    key: str
    shard: Shard
    index: int
    has_copy: bool
    newest: bool

    @property
    def keys(self) -> set[str]:
        """The keys of the shard and of its copy."""
        return {self.key, copy_key(self.key)}


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

        def check(part: _Part, reader: ObjectReader, origin: str) -> None:
            part.shard.check(reader, origin, self._participant.scratch, whole=True)

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
        headers: dict[_Part, Mapping[str, str]] = {}

        def load(part: _Part, reader: ObjectReader, origin: str) -> None:
            if part.newest and participant.owner(part.shard.number) == rank:
                headers[part], chunks, scalars = part.shard.described(reader, origin)
                # Before its first outer step a fragment has outer state only if the outer loop was loaded when the run began.
                if scalars or any(chunks.values()):
                    self._jobs[part.index].install_outer(chunks, scalars)
                counted[part.index] = _steps(headers[part].get("steps"), origin)
            part.shard.load(reader, origin, participant.scratch)

        try:
            replaced = self._read(manifest, sync, listing, load)
        except CorruptedObjectError as error:
            raise CorruptedObjectError(
                f"{str(error).rstrip('.')}. The state after outer step {manifest.outer_steps(sync)}, which the run was to "
                f"continue from, is damaged. {GO_BACK}"
            ) from error
        self._write_again(headers, {*listing}.difference(replaced))
        syncs = manifest.last_syncs(sync)
        kept = {
            key for index, last in enumerate(syncs) for key in needed_keys(manifest, index, last)
        }
        previous = [self._superseded(manifest, last) for last in sorted(syncs)]
        # A fragment's first state has copies.
        kept.update(map(copy_key, [*kept]))
        kept.update(*previous)
        obsolete = [
            *(key for key in own_shards(listing, rank, manifest.world_size) if key not in kept),
            *own_contributions(participant.store.list("deltas/"), rank, participant.run),
        ]
        newest = syncs.index(max(syncs))
        rate = next(_rate(headers[part], part.key) for part in headers if part.index == newest)
        taken = TakenUp(manifest.outer_steps(sync), max(counted), syncs, counted, rate)
        return taken, obsolete, previous

    def _write_again(
        self, headers: Mapping[_Part, Mapping[str, str]], whole: Collection[str]
    ) -> None:
        """Write what is missing or damaged of shards that have copies, with the values that were adopted.

        Args:
            headers: The metadata of the shards of this rank that hold the newest values.
            whole: The keys of the objects that are there and not damaged.
        """
        for part, metadata in headers.items():
            for lost in part.keys.difference(whole) if part.has_copy else ():
                self._participant.check_not_resumed()
                self._participant.store.put(lost, partial(part.shard.parts, metadata))

    def _superseded(self, manifest: Manifest, sync: int) -> list[str]:
        """Keys of the shards of this rank in whose place a sync has put newer ones."""
        if sync < len(self._jobs):
            return []
        index = manifest.fragment_of(sync)
        # Not always as many syncs before as there are fragments: a run that was begun with a loaded outer loop may have begun in
        # the middle of the turns.
        before = manifest.last_syncs(sync - 1)[index]
        full = manifest.full_states(index)
        if not full.is_full(sync):
            return []  # it has only an update, so what came before is still needed
        keys = needed_keys(manifest, index, before)
        if full.needed(before)[0] < len(self._jobs):
            keys += [copy_key(key) for key in keys]
        return own_shards(keys, self._participant.rank, manifest.world_size)

    def _read(
        self,
        manifest: Manifest,
        sync: int,
        listing: dict[str, int],
        use: Callable[[_Part, ObjectReader, str], object],
    ) -> list[str]:
        """Call ``use`` with each part of a state, its open file, and what errors call that file.

        Returns:
            Keys in whose place copies were read.
        """
        participant, count = self._participant, len(self._jobs)
        parts: dict[str, _Part] = {}
        for index, last in enumerate(manifest.last_syncs(sync)):
            for needed in manifest.full_states(index).needed(last):
                job = self._initial[index] if needed < count else self._jobs[index]
                of_run = replace(participant, run=manifest.run_of(needed))
                objects = SyncObjects(of_run, needed, job)
                for number in range(job.layout.shards):
                    key = objects.state_key(number)
                    shard = objects.shard(number)
                    parts[key] = _Part(
                        key, shard, index, has_copy=needed < count, newest=needed == last
                    )

        def announce(key: str, reader: ObjectReader) -> None:
            parts[key].shard.announce_load(reader, key)

        replaced = []
        sizes = {key: listing.get(key) for key in parts}
        store = participant.store
        with open_ahead(store.store, sizes, announce) as readers:
            for (key, part), reader in zip(parts.items(), readers, strict=True):
                act = partial(use, part)
                try:
                    read_shard(participant, key, reader, act, _GONE)
                except CorruptedObjectError as error:
                    if copy_key(key) not in listing:
                        raise
                    _log.error("%s. Its copy is used instead.", str(error).rstrip("."))
                    read_shard(participant, copy_key(key), None, act, _GONE)
                    replaced.append(key)
        return replaced


def _rate(header: Mapping[str, str], origin: str) -> Rate:
    rate = Rate.parse(header.get("outer_lr", "-"))
    if rate is None:
        raise CorruptedObjectError(f"the header of {origin} does not say its outer learning rate")
    return rate


def _steps(text: str | None, origin: str) -> int:
    if text is None or not text.isdecimal():
        raise CorruptedObjectError(f"the header of {origin} does not say how many steps it counts")
    return int(text)

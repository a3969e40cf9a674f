"""The state that a resumed run continues with: rank 0 chooses it and writes it down, and all replicas load it."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ..._errors import (
    CorruptedObjectError,
    FormatError,
    RendezvousError,
    RendezvousTimeoutError,
    RunExistsError,
)
from ..._exchange._endings import Progress
from ..._exchange._resumable import TakenUp
from ..._store._ahead import open_ahead
from ..._store._reread import read_again
from ..._timing import Wait
from .._manifest import Manifest, cut, manifest_key
from .._records import claimed, note_key, noted, read_note
from .._sync._objects import SyncObjects, own_contributions, own_shards, state_key
from ._base import GO_BACK, newest_manifest, read_manifest
from ._choice import missing_keys, of_unknown_lives, states

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ..._arithmetic._sync_job import SyncJob
    from ..._exchange._base import Schema
    from ..._exchange._resumable import ResumableJob
    from ..._store._api import ObjectReader
    from ..._wire._published import Shard
    from .._liveness import Liveness
    from .._participant import Participant
    from .._records import Claim
    from ._meeting import Meeting

_log = logging.getLogger("diloco_core")


class Loader:
    """Takes up a stopped run with the others. Not thread-safe.

    Args:
        participant: This replica in the new life, whose ``earlier`` lives are not known yet.
        claims: The claims of all ranks, in rank order.
        jobs: All fragments.
        initial: The first sync of each fragment.
    """

    def __init__(
        self,
        participant: Participant,
        claims: Sequence[Claim],
        jobs: Sequence[ResumableJob],
        initial: Sequence[SyncJob],
    ) -> None:
        self._participant = participant
        self._claims = claims
        self._jobs = jobs
        self._initial = initial

    def choose(self, schema: Schema, run_id: str, *, may_go_back: bool) -> Manifest:
        """Choose the state, and write the new life's manifest, which names it. Rank 0 does this.

        Args:
            schema: What the replicas have in common.
            run_id: The launch that they belong to.
            may_go_back: Whether an older state may be taken if the newest one is damaged. It is verified then.

        Raises:
            RendezvousError: The run has not published a state.
            CorruptedObjectError: The newest state is damaged or incomplete.
            RunExistsError: A later process has resumed the run, or another one does at the same time.
        """
        store, timing = self._participant.store, self._participant.timing
        if read_manifest(store, timing, self._claims[0].life) is not None:
            # Only a store that ignores conditional writes lets two processes claim the same life.
            raise RunExistsError(
                f"two processes of rank 0 resume the run at {store.uri} at the same time, and the other one has already chosen "
                "the state to continue from. Start every rank only once. When all of these processes have ended, the run can be "
                "resumed."
            )
        # Read again: since this process began, another attempt may have got as far as choosing a state. It has ended.
        base = newest_manifest(store, timing, self._claims[0].life, may_go_back=may_go_back)
        if base is None:
            raise CorruptedObjectError(f"the manifest in {store.uri} is gone")
        sync = self._choose(base, may_go_back=may_go_back)
        settings = {**schema.settings, "committed": base.settings["committed"]}
        manifest = replace(
            base,
            run_id=run_id,
            run=self._participant.run,
            settings=settings,
            members=[(claim.life, claim.nonce) for claim in self._claims],
            earlier=cut(base, sync),
        )
        self._participant.check_not_resumed()
        store.put(manifest_key(manifest.life), lambda: [manifest.to_bytes()])
        return manifest

    def _choose(self, base: Manifest, *, may_go_back: bool) -> int:
        store = self._participant.store
        listing, commits = store.list("state/"), store.list("commits/")
        self._check_lives(base, [*listing, *commits], may_go_back=may_go_back)
        found = states(base, listing, commits, self._finished(base))
        whole = [
            sync for sync in found.whole if not may_go_back or self._is_whole(base, sync, listing)
        ]
        if not whole and found.least < 0 and not found.whole:
            raise RendezvousError(
                f"the run at {store.uri} ended before it had published its initial state, so there is nothing to resume. Begin a "
                "new run on another prefix, without resume=."
            )
        if not whole:
            raise CorruptedObjectError(
                f"{store.uri} holds no whole state any more: {self._missing(base, listing, max(found.least, 0))}. Begin a new "
                "run on another prefix."
            )
        if whole[0] < found.least:
            missing = self._missing(base, listing, found.least)
            text = (
                f"the state after outer step {base.outer_steps(found.least)} in {store.uri} is incomplete: {missing}, although "
                "later objects show that it was there. Something else has deleted it."
            )
            if not may_go_back:
                raise CorruptedObjectError(f"{text} {GO_BACK}")
            _log.error("%s", text)
        if whole[0] < max(found.least, found.whole[0]):
            _log.error(
                "the run at %s continues from outer step %d, since no newer state is whole. What it had learned since is lost.",
                store.uri,
                base.outer_steps(whole[0]),
            )
        return whole[0]

    def _check_lives(self, base: Manifest, keys: Iterable[str], *, may_go_back: bool) -> None:
        """Refuse to take an older state for the newest one because a manifest is gone."""
        store = self._participant.store
        lives = [life for rank, life in claimed(store.list("claims/")) if rank == 0]
        unknown = of_unknown_lives(base, keys, lives, self._claims[0].life)
        if not unknown:
            return
        text = (
            f"{store.uri} holds {unknown[0]}, which the run has published after it was resumed, but no manifest says so: an "
            "object under manifests/ is damaged, or something else has deleted it. If you have a copy, put it back."
        )
        if not may_go_back:
            raise CorruptedObjectError(f"{text} {GO_BACK}")
        _log.error("%s", text)

    def _missing(self, base: Manifest, listing: dict[str, int], sync: int) -> str:
        keys = missing_keys(base, listing, sync)
        if not keys:
            return "its objects are damaged"
        more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
        return f"{keys[0]}{more} missing"

    def _finished(self, base: Manifest) -> list[int]:
        """How many syncs those replicas of the newest life have finished that have left a note."""
        store = self._participant.store
        notes = noted(store.list("notes/"))
        numbers = []
        for rank, (life, nonce) in enumerate(base.members):
            if (rank, life) not in notes:
                continue
            key = note_key(rank, life)
            try:
                ending, writer = read_note(store.get(key) or b"", rank, f"{store.uri}/{key}", life)
            except (CorruptedObjectError, FormatError):
                continue  # the note is only one of several sources
            if writer == nonce:
                numbers.append(ending.progress.number)
        return numbers

    def _is_whole(self, base: Manifest, sync: int, listing: dict[str, int]) -> bool:
        """Whether every byte of a state is as it was written; logs what is not."""

        def check(shard: Shard, _: ResumableJob | None, reader: ObjectReader, origin: str) -> None:
            shard.check(reader, origin, self._participant.scratch, whole=True)

        try:
            self._read(base, sync, listing, check)
        except CorruptedObjectError as error:
            _log.error(
                "the state after outer step %d cannot be used: %s", base.outer_steps(sync), error
            )
            return False
        return True

    def obey(self, liveness: Liveness, meeting: Meeting) -> Manifest:
        """Wait until rank 0 has chosen the state. Returns the new life's manifest.

        Args:
            liveness: Tells whether rank 0 has failed.
            meeting: Where this replica has met the others. Rank 0 may still have to read what it said there.

        Raises:
            ReplicaLostError: Rank 0 has failed.
            RendezvousTimeoutError: Rank 0 has not chosen in time.
            RunExistsError: The manifest is that of another life.
        """
        store, timing, life = (
            self._participant.store,
            self._participant.timing,
            self._claims[0].life,
        )

        def look_around() -> None:
            self._participant.check_not_resumed()
            meeting.write_again()
            liveness.check([0], Progress(), "the choice of the state to continue from")

        wait = Wait(
            timing,
            store.near,
            timing.join_timeout,
            look_around,
            lambda: RendezvousTimeoutError(
                f"rank 0 did not choose the state to continue from within {timing.join_timeout:g} s: look at its logs",
                [0],
            ),
            downtime=lambda: store.downtime,
        )
        while (manifest := read_manifest(store, timing, life)) is None:
            wait.pause()
        if manifest.run != self._participant.run:
            raise RunExistsError(
                f"{store.uri}/{manifest_key(life)} is that of other processes than those that have met: start all ranks again "
                "with resume=True"
            )
        return manifest

    def load(self, manifest: Manifest) -> tuple[TakenUp, list[str]]:
        """Load the state that the manifest names.

        Returns:
            Where the run stands; and keys of this rank that are no longer needed when all replicas have loaded it.

        Raises:
            CorruptedObjectError: The state is damaged.
        """
        participant = self._participant
        rank = participant.rank
        _, sync = manifest.earlier[-1]
        listing = participant.store.list("state/")
        counted: list[int] = []

        def load(shard: Shard, job: ResumableJob | None, reader: ObjectReader, origin: str) -> None:
            if participant.owner(shard.number) == rank:
                metadata, chunks, scalars = shard.described(reader, origin)
                if job is not None:
                    job.install_outer(chunks, scalars)
                if metadata.get("sync") == str(sync):
                    counted.append(_steps(metadata.get("steps"), origin))
            shard.adopt(reader, origin, participant.scratch)

        try:
            self._read(manifest, sync, listing, load)
        except CorruptedObjectError as error:
            raise CorruptedObjectError(
                f"{str(error).rstrip('.')}. The state after outer step {manifest.outer_steps(sync)}, which the run was to "
                f"continue from, is damaged. {GO_BACK}"
            ) from error
        syncs = manifest.last_syncs(sync)
        kept = {
            state_key(manifest.run_of(last), last, shard)
            for index, last in enumerate(syncs)
            for shard in range(manifest.fragments[index]["shards"])
        }
        obsolete = [
            *(key for key in own_shards(listing, rank, manifest.world_size) if key not in kept),
            *own_contributions(participant.store.list("deltas/"), rank, participant.run),
        ]
        return TakenUp(manifest.outer_steps(sync), counted[0], syncs), obsolete

    def _read(
        self,
        manifest: Manifest,
        sync: int,
        listing: dict[str, int],
        use: Callable[[Shard, ResumableJob | None, ObjectReader, str], object],
    ) -> None:
        """Call ``use`` with each shard of a state, its fragment if an outer step was taken, and its open file."""
        participant, count = self._participant, len(self._jobs)
        shards: dict[str, Shard] = {}
        fragments: dict[str, ResumableJob | None] = {}
        for index, last in enumerate(manifest.last_syncs(sync)):
            job = self._initial[index] if last < count else self._jobs[index]
            of_run = replace(participant, run=manifest.run_of(last))
            objects = SyncObjects(of_run, last, job)
            for number in range(job.layout.shards):
                key = objects.state_key(number)
                shards[key] = objects.shard(number)
                fragments[key] = None if last < count else self._jobs[index]

        def announce(key: str, reader: ObjectReader) -> None:
            shards[key].announce(reader, key)

        sizes = {key: listing.get(key) for key in shards}
        store = participant.store
        with open_ahead(store.store, sizes, announce) as readers:
            for (key, shard), reader in zip(shards.items(), readers, strict=True):
                _read_shard(participant, key, reader, partial(use, shard, fragments[key]))


def _read_shard(
    participant: Participant,
    key: str,
    opened: ObjectReader | None,
    use: Callable[[ObjectReader, str], object],
) -> None:
    store = participant.store
    origin = f"{store.uri}/{key}"

    def read() -> None:
        nonlocal opened  # used by the first attempt only
        reader, opened = opened, None

        def act(reader: ObjectReader) -> bool:
            use(reader, origin)
            return True

        if store.read(key, act, reader) is None:
            raise CorruptedObjectError(f"{origin} is gone: something deletes objects there")

    read_again(participant.timing, read)


def _steps(text: str | None, origin: str) -> int:
    if text is None or not text.isdecimal():
        raise CorruptedObjectError(f"the header of {origin} does not say how many steps it counts")
    return int(text)

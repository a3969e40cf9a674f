"""The result of a committed sync, while one incarnation takes or computes it, and its base.

Shards are taken as they were published, so that all incarnations hold the same bytes. The base is
the state after the last sync. Every incarnation holds all its values. The outer state of a shard is
held only by the incarnation that has updated the shard last. If another incarnation updates it
next, that incarnation reads the outer state. What is held is compared with what was published.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..._errors import CorruptedObjectError, DivergedError
from ..._exchange._resumable import ResumableJob
from ..._store._api import ObjectReader
from ..._store._reread import open_ahead
from ..._wire._published import Shard, Sums, shard_metadata
from .._incarnation._incarnation import Incarnation
from .._incarnation._progress import Progress
from .._records._records import Commit, Done
from .._records._rules import done_states
from .._repair import check_shard, readable_done
from .._round._reload import ReloadError, Why
from .._states._load import read_values


@dataclass(slots=True)
class Result:
    """The state after a sync, while one incarnation takes or computes it.

    Written by the code that takes or computes shards.

    Attributes:
        incarnation: The incarnation.
        commit: The sync's record, to be obeyed as it is.
        progress: What the incarnation holds of the fragment: at first the state before, and then
            more and more shards of this one.
        mending: Whether this state was published before, and a part of it is damaged or gone.
        done: The record of this state, if the state is being mended and the record can be read:
            only what it says is written.
        damaged: What is wrong with damaged shards in the store, by number.
        without: For shards that this incarnation has computed without its rank's own part: whose
            part that is.
        previous: The sync from whose state the result is computed.
    """

    incarnation: Incarnation
    commit: Commit
    progress: Progress
    mending: bool
    done: Done | None
    damaged: dict[int, str] = field(default_factory=dict)
    without: dict[int, str] = field(default_factory=dict)
    previous: int = field(init=False)

    def __post_init__(self) -> None:
        self.previous = self.progress.sync

    @property
    def sync(self) -> int:
        """Number of the sync."""
        return self.commit.sync

    @property
    def index(self) -> int:
        """Index of the fragment."""
        return self.commit.fragment

    @property
    def job(self) -> ResumableJob:
        """The fragment."""
        return self.progress.job

    def key(self, shard: int) -> str:
        """Key of a shard of the result."""
        return self.incarnation.key(self.sync, self.index, shard)

    def shard(self, shard: int) -> Shard:
        """A shard of the result."""
        return self.incarnation.shard(self.sync, self.index, shard)

    def metadata(self, shard: int) -> dict[str, str]:
        """The metadata in the header of a shard of the result."""
        return shard_metadata(self.job, self.sync, self.without.get(shard, ""))

    def settle(self, shard: int, values: int, rest: int | None) -> None:
        """Note that memory now holds the values of a shard, and that these are its checksums."""
        self.progress.values_at[shard] = self.sync
        self.progress.without.pop(shard, None)
        if shard in self.without:
            self.progress.without[shard] = self.without[shard]
        self.progress.sums[shard] = values
        self.progress.rests[shard] = rest


def adopt_published(result: Result, shards: Iterable[int]) -> list[int]:
    """Adopt those of the shards that are published by now, as :func:`adopt` does.

    Returns those that could be read.
    """
    incarnation = result.incarnation
    listing = incarnation.store.list(f"state/{result.sync:08}/")
    numbers = {result.key(shard): shard for shard in shards}
    sizes = {key: listing[key] for key in numbers if key in listing}

    def announce(key: str, reader: ObjectReader) -> None:
        result.shard(numbers[key]).announce(reader, incarnation.origin(key))

    with open_ahead(incarnation.store.store, sizes, announce) as readers:
        opened = zip(sizes, readers, strict=True)
        return [numbers[key] for key, reader in opened if adopt(result, numbers[key], reader)]


def adopt(result: Result, shard: int, opened: ObjectReader | None = None) -> bool:
    """Adopt a shard as it was published.

    Returns:
        False if it is not published, or is damaged and has to be computed again.

    Raises:
        ReloadError: The values in memory, to which a published change is added, are not those that
            it belongs to.
    """
    incarnation, progress = result.incarnation, result.progress
    key, stored = result.key(shard), result.shard(shard)

    if result.job.coded is not None and progress.values_at[shard] != result.previous:
        # This incarnation has begun to compute the shard, and a change can only be added to the
        # values before.
        try:
            if read_values(incarnation, progress, shard) is not None:
                return False
        except CorruptedObjectError as error:
            raise ReloadError(Why.DAMAGED, damage=error) from error

    def use(reader: ObjectReader) -> Sums:
        if result.job.coded is None:
            progress.values_at[shard] = None
        return stored.adopt(reader, incarnation.origin(key), incarnation.scratch)

    try:
        if result.mending:  # parts of the file that adopting does not read may be damaged too
            check_shard(incarnation, result.sync, result.index, shard, result.done)
        # If it was deleted while it was read, and its space reused, it is gone at the next read.
        sums = incarnation.read_file(key, use, opened)
    except CorruptedObjectError as error:
        result.damaged[shard] = str(error)
        incarnation.say.error("%s. It will be computed again.", str(error).rstrip("."))
        return False
    except DivergedError:
        changed = CorruptedObjectError(
            f"the global copy of fragment {result.job.name} has changed in memory since sync "
            f"{result.previous}: with the change in {incarnation.origin(key)}, it does not become "
            "what the owner of the shard holds"
        )
        incarnation.say.error(
            "%s.%s Check the memory of this machine.",
            changed,
            "" if incarnation.fixed else " Reloading the published state.",
        )
        raise ReloadError(Why.DIFFERS, damage=changed) from None
    if sums is None:
        return False
    result.damaged.pop(shard, None)
    result.without.pop(shard, None)
    result.settle(shard, *sums)
    progress.forget_outer(shard, incarnation.chunk_bytes)
    incarnation.traffic.received += stored.adopted_bytes
    return True


def state_before(incarnation: Incarnation, index: int) -> Progress | None:
    """Return the progress for reading the state from which a fragment's last sync started.

    None if the store no longer holds that state, or its record cannot be read.
    """
    progress = incarnation.fragments[index]
    if progress.commit is None:
        return None
    listing, rollbacks = incarnation.store.list("state/"), incarnation.standing.rollbacks
    complete = done_states(listing, len(incarnation.fragments), rollbacks)[index]
    for sync in sorted({0, *complete}, reverse=True):
        if sync >= progress.sync:
            continue
        done = readable_done(incarnation, sync, index) if sync else incarnation.manifest.done(index)
        if done is not None:
            before = Progress.recorded(progress.job, done)
            if before.digest == progress.commit.base:
                return before
    return None


def check_copy(result: Result, shards: Sequence[int]) -> None:
    """Check that memory still holds the values that were published, if changes of them are encoded.

    A change is added to the values that each replica holds: if those of the owner were others,
    no replica would come to the sum that it publishes.

    Args:
        result: The result that is about to be computed.
        shards: The shards that this incarnation updates.

    Raises:
        CorruptedObjectError: The values of a shard have changed in memory.
    """
    for shard in shards if result.job.coded is not None else ():
        before = result.incarnation.shard(result.previous, result.index, shard)
        if before.digest() == result.progress.sums[shard]:
            continue
        error = CorruptedObjectError(
            f"the global copy of shard {shard} of fragment {result.job.name} has changed in memory "
            f"since sync {result.previous}: it is not what was published"
        )
        result.incarnation.say.error(
            "%s. Reading it again. Check the memory of this machine.", error
        )
        raise error

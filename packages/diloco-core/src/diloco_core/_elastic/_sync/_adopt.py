"""Adopting a committed sync: update the own shards, take the others' as published, and finish what others left undone."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ..._arithmetic._reduction import reduce_shards
from ..._errors import (
    CorruptedObjectError,
    ObjectNotFoundError,
    StoreUnavailableError,
    SyncTimeoutError,
)
from ..._store._ahead import open_ahead
from ..._store._patient import PAUSES
from ..._store._reread import read_again
from ..._wire._published import shard_metadata
from .._log._rules import done_states, newest_done
from .._repair import check_shard, computed_otherwise, read_commit, readable_done, rewrite_shard
from .._round._reload import Reload, Why
from .._states._kept import bring_back
from .._states._publications import Publications
from .._states._publish import publish_previous, write_done
from ._held import begin_to_hold, hold, state_before
from ._inputs import Inputs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from ..._arithmetic._layout import Piece
    from ..._arithmetic._sharded import Source
    from ..._store._api import ObjectReader
    from ..._timing import Wait
    from ..._wire._published import Sums
    from .._life import Life, Progress
    from .._log._records import Commit

_STAGGER = 0.5

_log = logging.getLogger("diloco_core")


class Adoption:
    """One life's adoption of one sync. Used once.

    Sharded: the k-th member owns shards k, k + members, …: it updates and publishes them, and everybody reads them. When
    an owner is late by one grace, the next member does its work; create-once settles a race, and all adopt what is there.
    Gather: everybody updates everything, and some syncs are published.

    Args:
        life: Whose.
        commit: The record, to be obeyed as it is.
        local: Whether this life's own contribution is in it, so that it need not be read back.
        before: The state that it starts from, where that is not the one in memory: the sync is adopted already, and some
            of its result is made again.
    """

    def __init__(
        self, life: Life, commit: Commit, local: bool, before: Progress | None = None
    ) -> None:
        self._life = life
        self._commit = commit
        self._local = local
        self._progress = before or life.fragments[commit.fragment]
        self._previous = self._progress.sync
        self._job = self._progress.job
        self._layout = self._job.layout
        ranks = [member.rank for member in commit.members]
        self._member = ranks.index(life.rank) if life.rank in ranks else None
        self._mending = before is not None or life.mending.get(commit.fragment) == commit.sync
        self._done = life.fragments[commit.fragment].done() if before is not None else None
        if self._mending and self._done is None:
            self._done = readable_done(life, commit.sync, commit.fragment)
        self._damaged: dict[int, str] = {}
        self._unreadable: CorruptedObjectError | None = None

    def run(self) -> None:
        """Adopt it; afterwards memory and store agree.

        Raises:
            Reload: Inputs are gone because newer state is complete.
            CorruptedObjectError: Inputs are gone or damaged, and nothing newer is there.
            SyncTimeoutError: A shard did not come in time.
        """
        shards = range(self._layout.shards)
        if self._life.gather:
            publish_previous(self._life, self._commit, self._member)
            self._compute([list(shards)])
            return
        # A state that is mended has been published once: what is whole of it is taken as it is, by its owner too.
        own = [shard for shard in shards if self.owner(shard) == self._member and not self._mending]
        try:
            self._compute([[shard] for shard in own])
        except CorruptedObjectError as error:
            self._leave_to_others(error)
            own = []
        self._take([shard for shard in shards if shard not in own])
        if self.designated:
            write_done(self._life, self._commit)

    def compute_again(self, shard: int, damage: CorruptedObjectError | None) -> None:
        """Write one shard of the result again, which is damaged or gone.

        Raises:
            Reload: Inputs are gone because newer state is complete.
            CorruptedObjectError: Inputs are gone or damaged, or something else comes out.
        """
        if damage is not None:
            self._damaged[shard] = str(damage)
        self._compute([[shard]])

    def owner(self, shard: int) -> int:
        """Which member updates a shard."""
        return shard % len(self._commit.members)

    @property
    def designated(self) -> bool:
        """Whether this life does the chores of this sync."""
        return self._member == self._commit.sync % len(self._commit.members)

    def turn(self, shard: int) -> float:
        """Seconds after which this life does the work of a shard's owner: the next member first, then the one after it."""
        if self._mending:
            return 0.0  # all of it was published once, so whatever is missing is for whoever comes first
        members = len(self._commit.members)
        distance = members if self._member is None else (self._member - self.owner(shard)) % members
        grace = self._life.settings.grace
        return grace + (distance - 1) * min(_STAGGER, grace / 10)

    def _take(self, pending: list[int]) -> None:
        """Read published shards, whichever is there first; do the work of owners that are late."""
        life = self._life
        turns = sorted({self.turn(shard) for shard in pending})

        def expired() -> Exception:
            ranks = sorted({self._commit.members[self.owner(shard)].rank for shard in pending})
            text = f"sync {self._commit.sync} at {life.store.uri}: the shards of ranks {ranks} did not come in time"
            return SyncTimeoutError(text, ranks)

        wait: Wait | None = None
        life.absent = set()
        while pending:
            elapsed = wait.elapsed() if wait else 0.0
            if elapsed >= life.settings.grace:
                # Who does not publish in time is most likely gone: the next sync does not wait for it once more.
                life.absent |= {
                    self._commit.members[self.owner(shard)].rank for shard in pending
                } - {life.rank}
            arrived = self._adopt_published(pending)
            for shard in pending:
                if (
                    shard not in arrived
                    and elapsed >= self.turn(shard)
                    and self._unreadable is None
                ):
                    try:
                        self._compute([[shard]])
                    except CorruptedObjectError as error:
                        self._leave_to_others(error)
                        break
                    arrived.append(shard)
            pending = [shard for shard in pending if shard not in arrived]
            if pending and not arrived:
                if self._unreadable is not None and elapsed >= life.settings.grace + max(turns):
                    raise self._unreadable
                wait = wait or life.wait(life.timing.sync_timeout, expired, turns)
                wait.pause()
        if wait is not None:
            life.traffic.waited += wait.elapsed()

    def _leave_to_others(self, error: CorruptedObjectError) -> None:
        """A contribution cannot be read. Its author needs no copy of it, and does the work of owners that are late.

        Raises:
            CorruptedObjectError: There is nobody who could: the sync is a former one, and its members have gone on.
        """
        if self._mending or not self._local:
            raise error
        self._unreadable = error
        _log.error(
            "rank %d: %s. Leaving the shards that need it to the other replicas, for %g s.",
            self._life.rank,
            str(error).rstrip("."),
            2 * self._life.settings.grace,
        )

    def _adopt_published(self, shards: list[int]) -> list[int]:
        """Adopt those shards that are published by now; returns them."""
        life, sync, index = self._life, self._commit.sync, self._commit.fragment
        listing = life.store.list(f"state/{sync:08}/")
        keys = {life.key(sync, index, shard): shard for shard in shards}
        there = {key: listing[key] for key in keys if key in listing}

        def announce(key: str, reader: ObjectReader) -> None:
            life.shard(sync, index, keys[key]).announce(reader, life.origin(key))

        with open_ahead(life.store.store, there, announce) as readers:
            return [
                keys[key]
                for key, reader in zip(there, readers, strict=True)
                if self._adopt(keys[key], reader)
            ]

    def _adopt(self, shard: int, opened: ObjectReader | None = None) -> bool:
        """Adopt a shard as it was published, if it was; where it is damaged it counts as not published."""
        life, sync, index = self._life, self._commit.sync, self._commit.fragment
        key = life.key(sync, index, shard)

        def use(reader: ObjectReader) -> Sums:
            self._progress.values_at[shard] = None
            return life.shard(sync, index, shard).adopt(reader, life.origin(key), life.scratch)

        def read() -> Sums | None:
            nonlocal opened
            first, opened = opened, None
            try:
                return life.store.read(key, use, first)
            except CorruptedObjectError:
                try:
                    life.store.store.open(key).close()
                except ObjectNotFoundError:
                    return None  # it was removed while it was read, and its space written over
                raise

        try:
            if self._mending:  # also what nobody needs to adopt it may be damaged
                check_shard(life, sync, index, shard, self._done)
            found = read_again(life.timing, read)
        except CorruptedObjectError as error:
            self._damaged[shard] = str(error)
            _log.error("rank %d: %s. It will be computed again.", life.rank, str(error).rstrip("."))
            return False
        if found is None:
            return False
        self._damaged.pop(shard, None)
        self._settle(shard, *found)
        self._progress.forget_outer(shard, life.chunk_bytes)
        life.traffic.received += sum(map(self._layout.piece_bytes, self._layout.shard(shard)))
        return True

    def _settle(self, shard: int, values: int, rest: int | None) -> None:
        self._progress.values_at[shard] = self._commit.sync
        self._progress.sums[shard] = values
        self._progress.rests[shard] = rest

    def _compute(self, batches: Sequence[Sequence[int]]) -> None:
        """Update shards from the contributions. A batch is updated together, and published before the next one's turn."""
        shards = [shard for batch in batches for shard in batch]
        # Where memory was written to since the contribution was made, it has to be read from the store.
        local = self._local and all(
            self._progress.values_at[shard] == self._previous for shard in shards
        )
        inputs: Inputs | None = None
        publications = Publications(self._life.store.store)
        try:
            for number, batch in enumerate(batches):
                pauses = iter((*PAUSES, None))
                while True:
                    try:
                        inputs = inputs or Inputs(
                            self._life, self._progress, self._commit, batches[number:], local=local
                        )
                        self._update(batch, inputs)
                        break
                    except _MadeAgain:
                        _close(inputs)
                        inputs, local = (
                            None,
                            False,
                        )  # the model does not hold the own contribution any more
                    except ObjectNotFoundError as error:
                        _close(inputs)
                        inputs = None
                        if (
                            next(pauses) is not None
                            and self._life.rollback
                            and bring_back(self._life)
                        ):
                            continue
                        for shard in batch:
                            self._look_again(shard, error)
                        batch = ()
                        break
                    except (StoreUnavailableError, CorruptedObjectError) as error:
                        _close(inputs)
                        inputs = None
                        self._consider(error, next(pauses))
                        local = False  # parts of the own values may be updated already
                if self._life.gather:
                    self._compare(batch)
                else:
                    for shard in batch:
                        self._publish(shard, publications)
            publications.finish()
        finally:
            _close(inputs)
            publications.abandon()

    def _update(self, batch: Sequence[int], inputs: Inputs) -> None:
        """Update the shards of a batch in memory."""
        if any([self._prepare(shard) for shard in batch]):  # noqa: C419 - all of them
            raise _MadeAgain
        for shard in batch:
            self._progress.values_at[shard] = None
        first, unchanged = self._watched(batch, inputs.sources[0])

        def verify() -> None:
            inputs.verify(batch)
            unchanged()

        reduce_shards(
            self._job,
            batch,
            [first, *inputs.sources[1:]],
            self._life.chunk_bytes,
            self._life.scratch,
            sync=self._commit.sync,
            block_bytes=inputs.block_bytes,
            everything=True,
            verify=verify,
        )
        for shard in batch:
            self._progress.outer_at[shard] = self._commit.sync

    def _consider(
        self, error: StoreUnavailableError | CorruptedObjectError, pause: float | None
    ) -> None:
        """What comes of an error in an update: another try after ``pause``, loading again, or the end."""
        if isinstance(error, PreviousStateError):
            raise Reload(Why.DAMAGED) from error
        if pause is None or (
            self._life.store.store.retries and isinstance(error, StoreUnavailableError)
        ):
            raise error
        self._life.timing.sleep(pause)
        if (
            self._life.gather
        ):  # what was updated in part can only be had again from what is published
            raise Reload(Why.DAMAGED) from error
        if isinstance(error, StoreUnavailableError):
            read_commit(
                self._life, self._commit.sync
            )  # which waits for the store as long as it is waited for anywhere

    def _compare(self, batch: Sequence[int]) -> None:
        """Gather: note what was computed, and see that it is what the record of a mended state says."""
        for shard in batch:
            values = self._life.shard(self._commit.sync, self._commit.fragment, shard).digest()
            if self._done is not None and values != self._done.sums[shard]:
                raise computed_otherwise(
                    self._life, self._life.key(self._commit.sync, self._commit.fragment, shard)
                )
            self._settle(shard, values, None)

    def _prepare(self, shard: int) -> bool:
        """See to it that memory holds the values and the outer state that the update starts from.

        Returns:
            Whether the shard was damaged in the store and has been made again. The model's values of it are lost then.

        Raises:
            PreviousStateError: It is damaged, and could not be made again like that.
        """
        life, progress, index = self._life, self._progress, self._commit.fragment
        if not begin_to_hold(life, progress, shard):
            return False
        key = life.key(progress.sync, index, shard)

        def read() -> None:
            with life.store.store.open(key) as reader:
                hold(life, progress, index, shard, reader)

        try:
            life.again(read)
        except ObjectNotFoundError:
            newest = newest_done(life.store.list("state/"), len(life.fragments))[index]
            if (
                newest <= progress.sync
                and not self._mending
                and make_again(life, index, shard, None)
            ):
                return True
            raise
        except CorruptedObjectError as error:
            if not self._mending and make_again(life, index, shard, error):
                return True
            # Reloading makes it again from the state before it.
            life.bad.add((index, self._previous))
            raise PreviousStateError(str(error)) from error
        return False

    def _watched(self, shards: Sequence[int], first: Source) -> tuple[Source, Callable[[], None]]:
        """See to it that the outer optimizer's state is still what was published: who else could tell, if it changed in memory?

        It is summed chunk by chunk, right before the update reads it, so that it comes out of the processor's cache.

        Returns:
            The first source, which sums too, and what raises after the last chunk if the state has changed.
        """
        life, progress, previous = self._life, self._progress, self._previous
        sums = {
            shard: life.shard(previous, self._commit.fragment, shard).summing(
                shard_metadata(self._job, previous)
            )
            for shard in shards
            if previous and progress.rests[shard] is not None
        }
        if not sums:
            return first, lambda: None
        # Chunks come in this order, and know nothing of shards.
        shard_of_chunk = (
            shard for shard in shards for _ in self._layout.chunks(shard, life.chunk_bytes)
        )

        def summed(piece: Piece, out: torch.Tensor) -> torch.Tensor:
            shard = next(shard_of_chunk)
            if shard in sums:
                sums[shard][0](piece)
            return first(piece, out)

        def unchanged() -> None:
            for shard, (_, result) in sums.items():
                if result() != progress.rests[shard]:
                    raise self._changed_in_memory(shard)

        return summed, unchanged

    def _changed_in_memory(self, shard: int) -> CorruptedObjectError:
        error = CorruptedObjectError(
            f"what the outer optimizer keeps of shard {shard} of fragment {self._job.name} changed in memory since sync "
            f"{self._previous}: it is not what was published"
        )
        _log.error(
            "rank %d: %s. Reading it again; look at this machine's memory.",
            self._life.rank,
            str(error).rstrip("."),
        )
        return error

    def _publish(self, shard: int, publications: Publications) -> None:
        life, sync, index = self._life, self._commit.sync, self._commit.fragment
        if shard in self._damaged or self._mending:
            damage = self._damaged.pop(shard, None)
            self._settle(
                shard, *rewrite_shard(life, self._progress, sync, shard, damage, self._done)
            )
            return
        sums: list[Sums] = []
        stored = life.shard(sync, index, shard)
        metadata = shard_metadata(self._job, sync)
        created = False

        def upload() -> None:
            nonlocal created
            created = life.create(
                life.key(sync, index, shard), lambda: stored.parts(metadata, sums.append)
            )

        def use() -> None:
            if created:
                self._settle(shard, *sums[-1])
            elif self._adopt(shard):
                pass  # somebody was faster: there is one version, and everybody takes it
            elif shard in self._damaged:
                self._compute([[shard]])
            else:
                self._look_again(
                    shard, f"{life.key(sync, index, shard)} was there, and has vanished"
                )

        publications.add(upload, use)

    def _look_again(self, shard: int, missing: object) -> None:
        """Inputs are gone: then the result is there, or newer state is complete.

        Where the result is known to be damaged, neither helps: only what is newer than it is of use.
        """
        life, sync, index = self._life, self._commit.sync, self._commit.fragment
        if not life.gather and not self._mending and self._adopt(shard):
            return
        rollbacks = [rollback for rollback, _ in life.rollbacks]
        newest = max(
            done_states(life.store.list("state/"), len(life.fragments), rollbacks)[index], default=0
        )
        if newest > sync or (newest == sync and not self._mending):
            raise Reload(Why.SUPERSEDED)
        result = (
            f"Its result is damaged as well: {life.reasons[index].rstrip('.')}. "
            if self._mending
            else ""
        )
        raise CorruptedObjectError(
            f"sync {sync} in {life.store.uri} is decided, and something that it is computed from is gone: "
            f"{str(missing).rstrip('.')}. {result}No newer state is complete."
        )


def make_again(life: Life, index: int, number: int, damage: CorruptedObjectError | None) -> bool:
    """Compute a shard of the state in memory again that is damaged or gone in the store, and write it there as it was.

    That takes the state before and the contributions to its sync, which stay until the next state is complete. Nothing else
    in memory is touched: other shards and fragments keep what they hold and what this replica has learned since.

    Returns:
        Whether it was possible. If so, memory holds the values and the outer state of the shard as they were published.
    """
    progress = life.fragments[index]
    if life.gather or progress.commit is None:
        return False
    progress.values_at[number] = None
    progress.forget_outer(number, life.chunk_bytes)
    key = life.key(progress.sync, index, number)
    life.reasons[index] = str(damage or f"{life.origin(key)} is gone")
    try:
        before = state_before(life, index)
        if before is None:
            return False
        Adoption(life, progress.commit, local=False, before=before).compute_again(number, damage)
    except (CorruptedObjectError, Reload) as error:
        _log.error("rank %d: %s could not be made again: %s", life.rank, life.origin(key), error)
        return False
    progress.values_at[number] = progress.outer_at[number] = progress.sync
    return True


def _close(inputs: Inputs | None) -> None:
    if inputs is not None:
        inputs.close()


class PreviousStateError(CorruptedObjectError):
    """The published state that a sync starts from is damaged."""


class _MadeAgain(Exception):  # noqa: N818 - never leaves this module
    """A shard that an update starts from had to be made again: what was to be read for the update is another thing now."""

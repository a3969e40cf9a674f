"""Computing and publishing shards of a sync's result from the contributions in its record."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial

from ..._arithmetic._contribution import shares
from ..._arithmetic._reduction import reduce_shards
from ..._errors import CorruptedObjectError, ObjectNotFoundError, StoreUnavailableError
from ..._store._patient import PAUSES
from ..._store._reread import in_parallel
from ..._wire._published import Sums, end_sums
from .._incarnation._incarnation import Incarnation
from .._records._keys import Delta
from .._records._rules import newest_done
from .._repair import computed_otherwise, read_commit, rewrite_shard
from .._round._reload import ReloadError, Why
from .._round._shares import inputs_are_superseded
from .._states._kept import bring_back
from .._states._load import begin_to_hold, hold
from ._inputs import Inputs
from ._result import Result, adopt, check_copy, state_before

_IF_ENCODED = (
    " that does not need this one. If the run is going on, start this replica again when the "
    "values of the fragment have been published whole once more (full_state_every)"
)


class Computation:
    """Updates shards of a result and, in the sharded topology, publishes them. Used once.

    Args:
        result: The result whose shards are computed.
        local: Whether the record names this incarnation's own contribution, so that it need not be
            read from the store.
    """

    def __init__(self, result: Result, *, local: bool) -> None:
        self._result = result
        self._local = local
        self._incarnation = result.incarnation
        self._commit = result.commit
        self._progress = result.progress
        self._job = result.job
        self._inputs: Inputs | None = None

    def run(self, batches: Sequence[Sequence[int]]) -> None:
        """Update shards.

        The shards of a batch are updated together; their publication begins before the next batch.

        Raises:
            CorruptedObjectError: Contributions are gone or damaged, and there is no newer state; or
                the values that are computed differ from those that were published.
            ReloadError: Contributions are gone because a newer state is complete, or the state
                before is damaged.
        """
        # If memory was overwritten since the contribution was made, the contribution has to be read
        # from the store.
        held = {self._progress.values_at[shard] for batch in batches for shard in batch}
        self._local = self._local and held <= {self._result.previous}
        # An upload reads memory, which must not change before its result was used.
        with closing(in_parallel(self._incarnation.store.store, self._uploads(batches))) as uploads:
            for shard, sums in uploads:
                self._published(shard, sums)

    def _uploads(
        self, batches: Sequence[Sequence[int]]
    ) -> Iterator[Callable[[], tuple[int, Sums | None]]]:
        """Update the shards of one batch after another, and yield what uploads each of them.

        An upload returns the number of the shard, and the checksums of the file that it has
        created; None if there was one already.
        """
        try:
            for number, batch in enumerate(batches):
                computed = batch if self._computes(batches[number:]) else ()
                if self._incarnation.gather:
                    self._compare(computed)
                    continue
                for shard in computed:
                    if shard in self._result.damaged or self._result.mending:
                        self._rewrite(shard)
                    else:
                        yield partial(self._upload, shard)
        finally:
            self._close()

    def _computes(self, batches: Sequence[Sequence[int]]) -> bool:
        """Update the first of these batches in memory.

        Returns False if its result was already published and has been adopted.
        """
        pauses: Iterator[float | None] = iter((*PAUSES, None))
        batch = batches[0]
        while True:
            try:
                self._open(batches)
                if not any([self._prepare(shard) for shard in batch]):  # noqa: C419 - all of them
                    self._update(batch, self._open(batches))
                    return True
                # A shard had to be made again, so the contribution is no longer in the model.
                self._close()
            except ObjectNotFoundError as error:
                self._close()
                may_repeat = next(pauses) is not None and self._incarnation.rollback
                if may_repeat and bring_back(self._incarnation):
                    continue
                for shard in batch:
                    self._look_again(shard, error)
                return False
            except (StoreUnavailableError, CorruptedObjectError) as error:
                self._close()
                self._consider(error, next(pauses))
            self._local = False  # parts of this incarnation's own values may be updated already

    def _open(self, batches: Sequence[Sequence[int]]) -> Inputs:
        """The contributions, opened for all batches that are still to be computed."""
        if self._inputs is None:
            self._inputs = Inputs(self._incarnation, self._commit, batches, local=self._local)
        return self._inputs

    def _close(self) -> None:
        if self._inputs is not None:
            self._inputs.close()
            self._inputs = None

    def _update(self, batch: Sequence[int], inputs: Inputs) -> None:
        """Update the shards of a batch in memory."""
        for shard in batch:
            self._progress.values_at[shard] = None
        check_copy(self._result, batch)
        for delta in self._commit.members if self._incarnation.fixed and not self._local else ():
            if delta.rank == self._incarnation.rank:
                self._say_what_is_lost(delta, batch)
        self._job.rate = self._commit.rate
        if inputs.clipping is not None:
            self._progress.clipped = self._commit.sync, inputs.clipping.report()

        amounts = [member.amount for member in self._commit.members]
        reduce_shards(
            self._job,
            batch,
            inputs.sources,
            self._incarnation.chunk_bytes,
            self._incarnation.scratch,
            sync=self._commit.sync,
            block_bytes=inputs.block_bytes,
            verify=partial(inputs.verify, batch),
            shares=shares(self._job.terms.weighting, amounts),
        )
        for shard in batch:
            self._progress.outer_at[shard] = self._commit.sync

    def _say_what_is_lost(self, own_delta: Delta, batch: Sequence[int]) -> None:
        """Note and log that an earlier incarnation's own part of these shards is lost.

        It had not sent that part.
        """
        self._result.without.update(dict.fromkeys(batch, f"{own_delta.rank}.{own_delta.epoch}"))
        self._incarnation.say.warning(
            "sync %d counts a contribution of an earlier incarnation of this rank (epoch %d), "
            "whose part of the shards that this rank updates is lost with it: what it had learned "
            "there, in inner steps %d to %d, counts as nothing.",
            self._commit.sync,
            own_delta.epoch,
            own_delta.start,
            own_delta.stop,
        )

    def _consider(
        self, error: StoreUnavailableError | CorruptedObjectError, pause: float | None
    ) -> None:
        """Decide what follows an error in an update.

        That is another attempt after ``pause``, loading again, or the end. Returns for another
        attempt, and raises the error if this is the end.
        """
        # An incarnation of a fixed run that has begun to update cannot begin again: no other
        # replica holds its own part.
        is_away = isinstance(error, StoreUnavailableError)
        repeated = is_away and self._incarnation.store.store.retries
        if pause is None or self._incarnation.fixed or repeated:
            raise error
        self._incarnation.timing.sleep(pause)
        if self._incarnation.gather:
            # A state that was updated in part can only be restored from what is published.
            raise ReloadError(Why.DAMAGED, damage=error) from error
        if is_away:
            # Any read will do: it waits for the store as long as reads wait everywhere.
            read_commit(self._incarnation, self._commit.sync)

    def _compare(self, batch: Sequence[int]) -> None:
        """Gather: note what was computed.

        If a state is mended, check that it is what the record of that state says.
        """
        result = self._result
        for shard in batch:
            values = result.shard(shard).digest()
            if result.done is not None and values != result.done.sums[shard]:
                raise computed_otherwise(self._incarnation, result.key(shard))
            result.settle(shard, values, None)

    def _prepare(self, shard: int) -> bool:
        """Make sure that memory holds the values and the outer state from which the update starts.

        Returns:
            Whether the shard was damaged in the store and has been made again. If so, the model's
            values of it are lost.

        Raises:
            ReloadError: It could not be made again by itself. Loading makes it again from the state
                before it.
        """
        incarnation, progress, index = self._incarnation, self._progress, self._commit.fragment
        if not begin_to_hold(incarnation, progress, shard):
            return False
        key = incarnation.key(progress.sync, index, shard)

        def read() -> None:
            with incarnation.store.store.open(key) as reader:
                hold(incarnation, progress, shard, reader)

        try:
            incarnation.again(read)
        except ObjectNotFoundError:
            is_newest = incarnation.newest_done()[index] <= progress.sync
            may_mend = is_newest and not self._result.mending
            if may_mend and make_again(incarnation, index, shard, None):
                return True
            raise
        except CorruptedObjectError as error:
            if not self._result.mending and make_again(incarnation, index, shard, error):
                return True
            incarnation.damage.distrust(index, self._result.previous, error)
            raise ReloadError(Why.DAMAGED, damage=error) from error
        return False

    def _rewrite(self, shard: int) -> None:
        result, progress = self._result, self._progress
        why = result.damaged.pop(shard, None)
        sums = rewrite_shard(self._incarnation, progress, result.sync, shard, why, result.done)
        result.settle(shard, *sums)

    def _upload(self, shard: int) -> tuple[int, Sums | None]:
        written: list[Sums] = []
        stored, metadata = self._result.shard(shard), self._result.metadata(shard)
        created = self._incarnation.create(
            self._result.key(shard), lambda: stored.parts(metadata, written.append)
        )
        return shard, written[-1] if created else None

    def _published(self, shard: int, sums: Sums | None) -> None:
        result = self._result
        if sums is not None:
            result.settle(shard, *sums)
        # Another incarnation was faster: there is only one version, and all incarnations take it.
        elif self._is_same(shard) or adopt(result, shard):
            pass
        elif shard in result.damaged:
            Computation(result, local=self._local).run([[shard]])
        else:
            key = self._incarnation.origin(result.key(shard))
            self._look_again(shard, f"{key} existed, but has been deleted since")

    def _is_same(self, shard: int) -> bool:
        """Say whether another incarnation has published an encoded shard with the same values.

        This incarnation then keeps the values that it has computed. So nothing has to be read to
        make the values before, to which a published change is added.
        """
        incarnation, result = self._incarnation, self._result
        if self._job.coded is None:
            return False
        key, stored = result.key(shard), result.shard(shard)
        own_sums = stored.sums(result.metadata(shard))
        origin = incarnation.origin(key)
        try:
            end = incarnation.read_file(key, lambda reader: end_sums(reader, origin))
        except CorruptedObjectError:
            return False  # reading it whole shows the same, and what is to be done then
        if end == own_sums:
            result.settle(shard, *own_sums)
        return end == own_sums

    def _look_again(self, shard: int, missing: object) -> None:
        """Find out why something that the result is computed from is gone.

        Either the result is published, or a newer state is complete. If the result is known to be
        damaged, it does not help that it is published: only a newer state does. Returns if the
        result is published, and has been adopted.

        Raises:
            CorruptedObjectError: There is neither.
            ReloadError: A newer state is complete.
        """
        incarnation, result = self._incarnation, self._result
        if not incarnation.gather and not result.mending and adopt(result, shard):
            return
        listing, count = incarnation.store.list("state/"), len(incarnation.fragments)
        every, rollbacks = incarnation.whole_every, incarnation.standing.rollbacks
        # A state that is not whole does not help: it is made of this result, too.
        newest = newest_done(listing, count, every, rollbacks)[result.index]
        if inputs_are_superseded(newest, result.sync, mending=result.mending):
            raise ReloadError(Why.SUPERSEDED)
        damaged, reason = "", result.damaged.get(shard)
        if result.mending:
            reason = incarnation.damage.reasons[result.index]
        if reason is not None:
            damaged = f"Its result is damaged as well: {reason.rstrip('.')}. "
        elif result.sync < max(newest_done(listing, count)):
            damaged = f"Its result {result.key(shard)} is gone as well. "
        raise CorruptedObjectError(
            f"sync {result.sync} in {incarnation.store.uri} is decided, but something from which "
            f"its result is computed is gone: {str(missing).rstrip('.')}. {damaged}No newer state "
            f"is complete{_IF_ENCODED if every > 1 else ''}."
        )


def make_again(
    incarnation: Incarnation, index: int, number: int, damage: CorruptedObjectError | None
) -> bool:
    """Compute a shard of the state in memory again, and write its file as it was.

    The file is damaged or gone. This needs the state before and the contributions to its sync,
    which stay in the store until the next state is complete. Nothing else in memory is touched:
    other shards and fragments keep what they hold and what this replica has learned since.

    Returns:
        Whether it was possible. If so, memory holds the values and the outer state of the shard as
        they were published.
    """
    progress = incarnation.fragments[index]
    if incarnation.gather or incarnation.fixed or progress.commit is None:
        return False
    progress.values_at[number] = None
    progress.forget_outer(number, incarnation.chunk_bytes)
    key = incarnation.key(progress.sync, index, number)
    incarnation.damage.reasons[index] = str(damage or f"{incarnation.origin(key)} is gone")
    try:
        before = state_before(incarnation, index)
        if before is None:
            return False
        done = progress.done(progress.commit)
        result = Result(incarnation, progress.commit, before, mending=True, done=done)
        if damage is not None:
            result.damaged[number] = str(damage)
        Computation(result, local=False).run([[number]])
    except (CorruptedObjectError, ReloadError) as error:
        incarnation.say.error("%s could not be made again: %s", incarnation.origin(key), error)
        return False
    progress.values_at[number] = progress.outer_at[number] = progress.sync
    return True

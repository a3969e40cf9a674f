"""The place of one replica in a run: how it joins, where it stands, and how it leaves or fails."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from .._errors import ConfigurationError, CoreError, FencedError, RunExistsError, SyncError
from .._exchange._base import Schema
from .._exchange._endings import as_text
from .._exchange._one_thread import one_thread
from .._exchange._pending import Syncs
from .._exchange._resumable import Position, ResumableJob
from .._exchange._telemetry import Telemetry
from .._store._api import Store
from .._store._patient import Patient
from .._timing import Timing
from ._claims import check_run, claim, watch_manifest
from ._generations._entering import Entrance
from ._generations._names import FOLDER
from ._incarnation._incarnation import Incarnation
from ._policy._ends import refuse_again, refuse_ended, refuse_left
from ._policy._meeting import TELL_SECONDS, meet, name_of, tell_refusal
from ._policy._others import Beats, Others, changeable
from ._records._attendance import farewell
from ._records._keys import MANIFEST, Hint, highest_epochs
from ._round._reload import ReloadError
from ._settings import Fixed, Joiner, Settings
from ._start import Opening, committed_in, read_manifest
from ._states._publish import collect, finish
from ._states._rollback import ends_in_log, obey_rollback, saying_what_to_do
from ._sync._catchup import catch_up
from ._sync._fork import look_back


class Member:
    """One replica of a run, from its start to its end. Used by one thread.

    Args:
        store: The run's prefix.
        rank: The rank of this replica.
        world_size: How many ranks there may be.
        run_id: The launch to which the replicas belong.
        settings: How membership behaves.
        timing: Limits in seconds.
        chunk_bytes: Size of a buffer in bytes.

    Attributes:
        resumes: Whether this replica was told to resume the run.
        comes_back: Whether an earlier incarnation of its rank was in the run, or the run has been
            resumed; once it has begun.
        when_ended: Called when this replica has left or failed.
        telemetry: Writes what this replica tells of itself; None if nothing is written.
    """

    comes_back = False
    telemetry: Telemetry | None = None

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        run_id: str,
        settings: Settings,
        timing: Timing,
        chunk_bytes: int,
    ) -> None:
        self._syncs = Syncs()
        self._timing = replace(timing, sleep=self._syncs.sleeping(timing.sleep))
        self._store = Patient(store, self._timing)  # where the run's objects are
        self._decides = self._store.creates_once()
        if settings.fixed:
            # It has answered: the others must not end because of an outage while they meet.
            store.patience = timing.sync_timeout
        elif not self._decides:
            raise ConfigurationError(
                f"{store.uri} lets an object be created twice: it ignores conditional writes, so "
                "replicas could not agree on which of them take part in a sync. Use a store with "
                "exclusive creation, or fixed membership (leave min_replicas out)."
            )
        self.rank = rank
        self.world_size = world_size
        self.run_id = run_id
        self.store = store
        self.settings = settings
        self.fixed = settings.fixed
        self.resumes = bool(settings.resume)
        self.when_ended: Callable[[], object] = bool
        self.last_attempt = False  # whether nothing starts this replica again if it fails
        self._chunk_bytes = chunk_bytes
        self._schema: Schema | None = None
        self._entrance: Entrance | None = None
        self._incarnation: Incarnation | None = None
        self._ended = ""
        self._run = ""

    @one_thread()
    def restore(self, jobs: Sequence[ResumableJob], *, loaded: bool = False) -> Position:
        """Begin or join the run, and take its newest state.

        The state is the published shards, and what was committed after them.

        Args:
            jobs: All fragments, in the order in which they are synced. If this replica begins the
                run, their values are the initial state.
            loaded: Whether they hold a state that was loaded, with its outer state.

        Raises:
            RunExistsError: The prefix belongs to another run.
            MismatchError: This replica has another model or other settings.
            RendezvousError: There is no run to resume.
            CorruptedObjectError: The store does not hold what its records promise.
            FencedError: The run has gone back to older states since this incarnation began, and
                this incarnation had not agreed to that.
        """
        self._check_open()
        if self._schema is None:
            raise SyncError("restore() was called before join(): call join() with the schema first")
        self._run = ""
        try:
            self._enter(self._schema, jobs)
            self._begin(self._schema, jobs, name_of(self._schema, self.run_id) if loaded else "")
        except BaseException as error:
            self.abort(error)
            raise
        finally:
            if self._entrance is not None:
                self._entrance.stop()
        incarnation = self._running()
        incarnation.say.info(
            "has joined the run as incarnation %d, at sync %d and inner step %d (process %d)",
            incarnation.epoch,
            incarnation.sync,
            self.counted,
            os.getpid(),
        )
        return self.position

    def _enter(self, schema: Schema, jobs: Sequence[ResumableJob]) -> None:
        """Find where the run's objects are.

        Where the store cannot decide, meet the others (:mod:`._generations`).
        """
        settings = self.settings
        if not isinstance(settings, Fixed) or (self._decides and not self._store.list(FOLDER)):
            return
        self.settings = replace(settings, decides=False, return_within=0.0)
        self._entrance = Entrance(self._store, schema, self._joiner)
        self._store = self._entrance.meet()
        self._entrance.carry(jobs)

    @property
    def _joiner(self) -> Joiner:
        return Joiner(self.rank, self.world_size, self.run_id, self.settings, self._chunk_bytes)

    def _begin(self, schema: Schema, jobs: Sequence[ResumableJob], loaded: str) -> None:
        """Begin or join the run where its objects are; ``loaded`` is the name of a loaded state."""
        store, joiner = self._store, self._joiner
        manifest = Opening(store, jobs, schema, joiner, loaded).manifest()
        if manifest.topology == "gather" and self.store.background is not None:
            self.store.background.budget = self.store.background.settings.gather_budget()
        self._run = manifest.run()
        reader = Incarnation.reading(store, jobs, manifest, joiner)
        self._incarnation = incarnation = _next_incarnation(reader, schema)
        if self.telemetry is not None:
            self.telemetry.begin(incarnation.epoch, incarnation.doing, schema)
        self.comes_back = incarnation.epoch > 1 or self.resumes
        store.before_writing = partial(check_run, incarnation)
        standing = incarnation.standing
        if incarnation.takes_means:
            refuse_again(incarnation)
            standing.begin()
        else:
            with saying_what_to_do(incarnation, going_back=self.settings.resume == "newest-whole"):
                catch_up(incarnation, first=True)
        standing.has_loaded()
        newest = max(each.sync for each in incarnation.fragments)
        for rollback in standing.rollbacks:
            if rollback.end is None or rollback.sync > newest:
                obey_rollback(incarnation, rollback)
        if self.fixed and incarnation.sync == manifest.first and not standing.rollbacks:
            meet(incarnation)
        incarnation.attendance.begin(standing.members, incarnation.now)
        store.patience = self._timing.sync_timeout

    @property
    def position(self) -> Position:
        """Return where this replica stands in the run."""
        incarnation = self._running()
        standing, fragments = incarnation.standing, incarnation.fragments
        return Position(
            incarnation.sync,
            sum(progress.outer_steps for progress in fragments) + incarnation.manifest.first,
            self.counted,
            incarnation.rollback,
            [progress.positions.get(self.rank, 0) for progress in fragments],
            standing.rate,
            standing.seen,
            standing.members.get(self.rank) == incarnation.epoch,
        )

    @property
    def counted(self) -> int:
        """Return the inner steps that the run has counted for this rank in all incarnations."""
        fragments = self._incarnation.fragments if self._incarnation else []
        return max((progress.positions.get(self.rank, 0) for progress in fragments), default=0)

    @property
    def epoch(self) -> int:
        """Number of this incarnation among those of its rank, from 1; 0 before :meth:`restore`."""
        return self._incarnation.epoch if self._incarnation else 0

    @property
    def ended(self) -> bool:
        """Say whether this replica has left its run or failed."""
        return bool(self._ended)

    @property
    def left(self) -> bool:
        """Say whether this replica has left its run after its last sync."""
        return self._ended == "left"

    @one_thread()
    def leave(self) -> None:
        """Tell the others that this replica is done, and make sure that the run can be resumed.

        A second call does nothing.
        """
        if not self._ended:
            self._syncs.check("this replica cannot leave")
            self._ended = "left"
            self.when_ended()
            try:
                if self._incarnation is not None and self._incarnation.fragments[0].sums:
                    self._say_goodbye(self._incarnation)
            finally:
                self._stop_beats()
                self._close()

    def abort(self, error: BaseException) -> None:
        """Tell the others not to wait for this replica; repeatable, never raises."""
        self._syncs.give_up()
        if self._ended:
            return
        kind = "was replaced" if isinstance(error, FencedError) else "failed"
        self._ended = f"{kind} ({as_text(error)})"
        self.when_ended()
        try:
            try:
                self._stop_beats()
                if self._incarnation is not None:
                    # An end by a signal is no failure: its sender may start the replica again.
                    final = self.last_attempt and isinstance(error, Exception)
                    final |= isinstance(error, CoreError) and error.final
                    _tell_failure(self._incarnation, error, final=final)
                elif self._is_awaited(error):
                    committed = 0 if self._schema is None else committed_in(self._schema)
                    tell_refusal(self._store, self.rank, self._run, committed + 1, error)
            finally:
                self._close(error)
        except Exception as second:  # noqa: BLE001 - the first error matters more
            error.add_note(f"the other replicas could not be told of this failure: {second}")

    def _close(self, error: BaseException | None = None) -> None:
        try:
            if self.telemetry is not None:
                self.telemetry.end(error)
        finally:
            self.store.close()

    def _is_awaited(self, error: BaseException) -> bool:
        """Say whether others wait to hear from this replica, which fails before it has joined."""
        if not self.fixed or isinstance(error, RunExistsError):
            return False
        if self.settings.decides:
            return not self.resumes
        return self._store.store is not self.store  # they have met

    def _stop_beats(self) -> None:
        if self._incarnation is not None and self._incarnation.others is not None:
            self._incarnation.others.stop()

    def _say_goodbye(self, incarnation: Incarnation) -> None:
        """Tell the other replicas that this incarnation is done.

        This also makes sure that the run can start again from the state that it holds.
        """
        watch_manifest(incarnation)
        _leave_word(incarnation, None, incarnation.sync)
        # If this incarnation's state is no longer the run's, there is nothing to publish.
        with suppress(ReloadError):
            look_back(incarnation)
            finish(incarnation)
            if incarnation.deletes_own:
                collect(incarnation)

    def _running(self) -> Incarnation:
        self._check_open()
        if self._incarnation is None:
            raise SyncError(
                "the exchange was used before restore(): call join() and restore() first"
            )
        return self._incarnation

    def _check_open(self) -> None:
        if self._ended:
            raise SyncError(
                f"this exchange has ended, because it {self._ended}. Connect again to continue the "
                "run."
            )


def _next_incarnation(reader: Incarnation, schema: Schema) -> Incarnation:
    """Make the next incarnation of a rank.

    The rank's earlier incarnations will stop. The new incarnation has loaded nothing yet.

    Args:
        reader: Reads the run by the manifest that was just read.
        schema: What the replicas must have in common.

    Raises:
        RunExistsError: Another run has taken the prefix; or a fixed run has ended, or this rank has
            left it, and this replica was not told to resume it.
    """
    store, settings, rank, run = reader.store, reader.settings, reader.rank, reader.run
    if not settings.fixed:
        epoch, record = claim(store, rank, run)
        return replace(reader, epoch=epoch, claim=record)
    ends = ends_in_log(reader)
    if not settings.resume:
        refuse_ended(ends, store.uri, means=reader.takes_means)
        refuse_left(store, rank)
    earlier = highest_epochs(store.list("claims/"))

    def check() -> None:
        """Refuse to go on if another run has taken the prefix since the manifest was read.

        The incarnations of that run are left alone.
        """
        if store.peek(MANIFEST) in {reader.manifest.to_json(), None, b""}:
            return
        current = read_manifest(store)  # a bit may have flipped on its way
        if current is not None and current.run() != run:
            raise RunExistsError(
                f"the manifest at {store.uri} has changed while this replica (rank {rank}) was "
                "joining the run: another run may use this prefix by now. Give every run a prefix "
                "of its own, and start this replica again."
            )

    may_change = changeable(schema.settings)
    epoch, record = claim(store, rank, run, may_change, check)
    beats = Beats(store.store, rank, f"{epoch}", run, reader.timing)
    beats.start()
    others = Others(beats, may_change, earlier if settings.resume or epoch > 1 else {})
    passed_over = {end.sync for end in ends}
    return replace(reader, epoch=epoch, claim=record, others=others, passed_over=passed_over)


def _tell_failure(incarnation: Incarnation, error: BaseException, *, final: bool) -> None:
    """Tell the other replicas not to wait for this incarnation, which has failed."""
    # If the store cannot be reached, waiting for it once more would only delay the error.
    incarnation.store.patience = min(incarnation.store.patience, TELL_SECONDS)
    # An incarnation that was replaced has not failed: its rank goes on.
    reason = None if isinstance(error, FencedError) else error
    # If the prefix belongs to another run by now, the replicas of that run must not be told.
    with suppress(RunExistsError):
        if isinstance(error, RunExistsError):
            watch_manifest(incarnation)
        # One that fails while it loads stands at no sync: the others wait for it at the next one.
        loading = incarnation.fixed and not incarnation.sync
        sync = max(incarnation.recorded(), default=0) if loading else incarnation.sync
        # The sync in which it failed may be committed already, so the sync after it is told too.
        for number in (sync, sync + 1):
            _leave_word(incarnation, reason, number, final=final)


def _leave_word(
    incarnation: Incarnation, error: BaseException | None, sync: int, *, final: bool = False
) -> None:
    key = Hint(sync + 1, incarnation.rank, incarnation.epoch, "leave").key
    incarnation.store.put(key, lambda: [farewell(key, error, incarnation.rank, final=final)])

"""The exchange over an object store, with fixed or elastic membership.

Replicas may die and come back, or join late and leave.

The protocol is a log of syncs: first contributions, then one create-once record that says which of
them count. The store always holds enough to continue the run: the newest published state, and
everything that was committed after it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Literal, cast

from .._arithmetic._layout import CHUNK_BYTES
from .._arithmetic._shard_sizes import shards_of
from .._arithmetic._sync_job import SyncJob
from .._checks import check_identity, check_resume, whole
from .._errors import (
    ConfigurationError,
    CorruptedObjectError,
    FencedError,
    RunExistsError,
    SyncError,
    UnequalSyncsError,
)
from .._exchange._base import Exchange, Schema
from .._exchange._endings import as_text
from .._exchange._one_thread import one_thread
from .._exchange._pending import GivenUpError, Pending, Steps, Syncs
from .._exchange._report import SyncReport
from .._exchange._resumable import Position, ResumableJob
from .._inner._file import SavedInner
from .._model._unsynced import UnsyncedWatch
from .._store._api import Buffer, InBackground, Store, check_size
from .._store._patient import Patient
from .._terms._support import EVERYTHING_SENT
from .._timing import WATCH_EVERY, Timing
from ._claims import check_claim, watch_claim
from ._generations._entering import Entrance
from ._generations._names import FOLDER
from ._incarnation._incarnation import Incarnation
from ._inner import save_inner, save_residual, saved
from ._joining import leave_run, new_incarnation, reader_of, tell_failure
from ._policy._ends import refuse_again, refuse_ended, refuse_left, refuse_reload
from ._policy._meeting import meet, tell_refusal
from ._policy._others import changeable
from ._policy._together import name_of
from ._records._keys import Hint, parse_inner, parse_residual
from ._repair import read_commit
from ._round._reload import ReloadError
from ._settings import Elastic, Fixed, Joiner, Settings
from ._start import Opening, committed_in
from ._states._rollback import ends_in_log, given_up_since, obey_rollback, saying_what_to_do
from ._sync._catchup import catch_up, start_again
from ._sync._sync import StoreSync, stands_in
from ._watch import check_run, watch_manifest


class StoreExchange(Exchange):
    """Replicas meet in an object store; see :class:`._base.Exchange`. One thread at a time.

    An exchange carries one outer loop (:class:`DiLoCo`). Without ``elastic``, all ranks are in
    every sync. With it, there are at most ``world_size`` ranks; a sync needs contributions from
    ``min_replicas`` of them. A replica that comes back is a new incarnation of its rank, and
    replaces the earlier one.

    The store also keeps what belongs to one replica alone, for a later incarnation of its rank.
    ``join`` only says what the replicas must have in common; ``restore`` takes the run's state. A
    sync may replace the whole model; its report then has ``reloaded=True``.

    Attributes:
        resumes: Whether this replica was told to resume the run.
        comes_back: Whether an earlier incarnation of its rank was in the run, or the run has been
            resumed; once it has begun.

    Args:
        store: The run's prefix. For elastic runs it must create objects exclusively.
        rank: The rank of this replica.
        world_size: How many ranks there may be, fixed for the run. The number of shards is a
            multiple of it.
        elastic: How elastic membership behaves; None for fixed membership.
        run_id: The launch to which the replicas belong.
        timing: Limits in seconds.
        chunk_bytes: Size of a buffer in bytes; two of them are held.
        resume: Whether to continue the run that the prefix holds; see :class:`Elastic`, which has a
            setting of its own for that.

    Raises:
        ConfigurationError: A setting is impossible, or the store does not create exclusively.
    """

    comes_back = False

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        elastic: Elastic | None = None,
        *,
        run_id: str = "",
        timing: Timing | None = None,
        chunk_bytes: int = CHUNK_BYTES,
        resume: bool | Literal["newest-whole"] = False,
    ) -> None:
        rank, world_size = check_identity(rank, world_size)
        whole("chunk_bytes", chunk_bytes)
        check_resume(resume)
        if not isinstance(run_id, str):
            raise ConfigurationError(
                f"run_id must be text (a str), not {run_id!r} ({type(run_id).__name__})"
            )
        if elastic is not None and resume:
            raise ConfigurationError(
                f"resume={resume!r} cannot be passed beside elastic=: pass "
                f"Elastic({elastic.min_replicas}, resume={resume!r})"
            )
        self._syncs = Syncs()
        self._hurried = False
        given = timing or Timing()
        self._timing = replace(given, sleep=self._syncs.sleeping(given.sleep))
        if elastic is not None:
            elastic.check(world_size, self._timing.sync_timeout)
        settings = elastic or Fixed(world_size, given.lost_after, resume, given.return_within)
        self._store = Patient(store, self._timing)  # where the run's objects are
        self._decides = self._store.creates_once()
        if settings.fixed:
            # It has answered: the others must not end because of an outage while they meet.
            store.patience = self._timing.sync_timeout
        if not self._decides and elastic is not None:
            raise ConfigurationError(
                f"{store.uri} lets an object be created twice: it ignores conditional writes, so "
                "replicas could not agree on which of them take part in a sync. Use a store with "
                "exclusive creation, or fixed membership (leave min_replicas out)."
            )
        self.rank = rank
        self.world_size = world_size
        self.run_id = run_id
        self.store = store
        self.settings: Settings = settings
        self._entrance: Entrance | None = None
        self.fixed = settings.fixed
        self.resumes = bool(settings.resume)
        # In the gather topology every replica computes all values itself, and only a few syncs
        # publish any.
        gather = settings.topology == "gather"
        self.support = replace(
            EVERYTHING_SENT,
            state_codecs=not gather,
            gather=gather,
            keeps_state=True,
            takes_run=not settings.fixed,
            fewest=None if settings.fixed else settings.min_replicas,
            in_background=given.in_background,
            clock=given.clock,
            check_window=None if settings.fixed else self.check_window,
        )
        self._chunk_bytes = chunk_bytes
        self._schema: Schema | None = None
        self._incarnation: Incarnation | None = None
        self.when_ended: Callable[[], object] = bool  # called when this replica has left or failed
        self._ended = ""
        self._first = True
        self._hinted = 0
        self._run = ""
        self._under_way: StoreSync | None = None
        self._unsynced: UnsyncedWatch | None = None

    @one_thread()
    def join(self, schema: Schema) -> None:
        """Set what the replicas must have in common.

        They meet in :meth:`restore`, or before the first of plain means. For plain means, this may
        be called again with the same schema.
        """
        self._check_open()
        means = schema.settings.get("operation")
        if means and self._schema == schema:
            return
        if means and self.resumes:
            raise ConfigurationError(
                "resume= cannot be used for means, which have no state to go on with: leave it "
                "out, and use another prefix"
            )
        if means and not self.fixed:
            raise ConfigurationError(
                f"an elastic exchange is only for a DiLoCo outer loop, not for {means!r}, which "
                "has no state that a replica could return to. For it, connect without min_replicas."
            )
        coding = schema.terms.coding
        if coding is not None and self.settings.topology == "gather":
            raise ConfigurationError(
                f"state_codec={coding.codec.name!r} needs topology='sharded', but the exchange has "
                "topology='gather' by now"
            )
        if self._schema is not None:
            raise ConfigurationError(
                "this exchange has already joined its run, and it serves only one outer loop. "
                "Connect again for another one."
            )
        self._schema = schema

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
            store, joiner = self._store, self._joiner
            loaded_name = name_of(self._schema, self.run_id) if loaded else ""
            manifest = Opening(store, jobs, self._schema, joiner, loaded_name).manifest()
            if manifest.topology == "gather" and isinstance(self.store, InBackground):
                self.store.budget = self.store.transfer.gather_budget()
            self._run = manifest.run()
            reader = reader_of(store, jobs, manifest, joiner)
            if self.fixed:
                ends = ends_in_log(reader)
                if not self.settings.resume:
                    refuse_ended(ends, store.uri, means=reader.takes_means)
                    refuse_left(store, self.rank)
                passed_over = {end.sync for end in ends}
                incarnation = new_incarnation(
                    reader, passed_over, changeable(self._schema.settings)
                )
            else:
                incarnation = new_incarnation(reader)
            self._incarnation = incarnation
            self.comes_back = incarnation.epoch > 1 or self.resumes
            store.before_writing = partial(check_run, incarnation)
            if incarnation.takes_means:
                refuse_again(incarnation)
                incarnation.standing.begin()
            else:
                with saying_what_to_do(
                    incarnation, going_back=self.settings.resume == "newest-whole"
                ):
                    catch_up(incarnation, first=True)
            incarnation.standing.has_loaded()
            for rollback, _ in incarnation.standing.rollbacks:
                if rollback.end is None or rollback.sync > max(
                    each.sync for each in incarnation.fragments
                ):
                    obey_rollback(incarnation, rollback)
            if (
                self.fixed
                and incarnation.sync == manifest.first
                and not incarnation.standing.rollbacks
            ):
                meet(incarnation)
            incarnation.attendance.begin(
                incarnation.rank, incarnation.standing.members, incarnation.now, store.get
            )
            own = self._schema.unsynced
            self._unsynced = UnsyncedWatch(store, self.rank, manifest.unsynced, own)
            # At the beginning of a run, the replica that began it has just written these objects
            if incarnation.sync:
                self._unsynced.look(self.rank, self.world_size, whole=True)
            store.patience = self._timing.sync_timeout
        except BaseException as error:
            self.abort(error)
            raise
        finally:
            if self._entrance is not None:
                self._entrance.stop()
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

    def behind(self) -> bool:
        """Say whether there is a sync that this replica can adopt without contributing.

        There is one if the next sync is committed already, or if an earlier incarnation of this
        rank has contributed to it. Call this between syncs: it also announces this replica if the
        others do not expect it yet.
        """
        incarnation = self._running()
        try:
            if read_commit(incarnation, incarnation.sync + 1) is not None:
                return True
        except (CorruptedObjectError, ReloadError, RunExistsError):
            return True  # there is a record; the sync deals with what is wrong with it
        if self._first and stands_in(incarnation):
            return True
        self._first = False
        expects = (
            self.fixed or incarnation.standing.members.get(incarnation.rank) == incarnation.epoch
        )
        if not expects and self._hinted != incarnation.sync + 1:
            incarnation.store.put(
                Hint(incarnation.sync + 1, incarnation.rank, incarnation.epoch, "join").key,
                lambda: [b"\n"],
            )
            self._hinted = incarnation.sync + 1
        return False

    def begin(self, job: SyncJob, *, last: bool = False) -> Pending:
        """Contribute.

        ``finish()`` obeys the record of the sync and adopts its result. See
        :meth:`._base.Exchange.begin`.

        ``reloaded=True`` in the report means that this replica has reloaded the published state and
        continues training from there. The sync may have been decided and adopted all the same,
        including this replica's contribution.

        Args:
            job: The fragment whose turn it is.
            last: Whether the sync may be left out if too few replicas are left for it. The report
                then says ``committed=False``: after two graces (counted from the end of the window
                if replicas contribute by the time), or at once if all replicas that were expected
                are gone.

        Raises:
            FencedError: A newer incarnation of this rank has taken over.
            RunExistsError: The prefix belongs to another run by now, or holds records of one.
            SyncTimeoutError: Too few replicas contributed in time; nothing was decided.
            DivergedError: This replica computes other values than the others, even after reloading.
        """
        self._check_open()
        if self._schema is not None and self._schema.settings.get("operation"):
            self._take_mean(cast("ResumableJob", job))
        return self._syncs.begin(job.name, self._sync(self._running(), job, last), self._guarded)

    def _take_mean(self, job: ResumableJob) -> None:
        """Sync these tensors next: each mean has tensors of its own."""
        if self._incarnation is None:
            if isinstance(self.settings, Fixed):  # nobody could come back
                self.settings = replace(self.settings, return_within=0.0)
            self.restore([job])
        self._running().take_mean(job)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Calculate in one thread, and tell the other replicas if this one fails."""
        try:
            with one_thread():
                yield
        except GivenUpError:
            raise  # the replica itself says what becomes of it
        except UnequalSyncsError:
            # This sync can never be decided, since a replica has left without contributing to it.
            if self._under_way is not None:
                self._under_way.take_back()
            raise
        except BaseException as error:
            self.abort(error)
            raise

    def give_up(self) -> None:
        """Make a sync in another thread end soon.

        See :meth:`._base.Exchange.give_up`.
        """
        self._syncs.interrupt()

    def hurry(self, hurried: bool) -> None:
        """Say that a sync in another thread need not be decided.

        See :meth:`._base.Exchange.hurry`.
        """
        # Fixed: all ranks are in every sync. If this one left it and came back, its own part, which
        # it did not send, would no longer count.
        self._hurried = hurried and not self.fixed

    def _sync(self, incarnation: Incarnation, job: SyncJob, last: bool) -> Steps:
        with saying_what_to_do(incarnation, going_back=False):
            check_claim(incarnation)
            fragment = incarnation.fragments[incarnation.index(incarnation.sync + 1)].job
            if job is not fragment:
                raise SyncError(
                    f"begin() was called with fragment {job.name}, but sync {incarnation.sync + 1} "
                    f"is of fragment {fragment.name}: pass the fragments in the order in which "
                    "restore() received them"
                )
            self._first = False
            patience = 2 * self.settings.grace if last and not self.fixed else None
            window = 0.0 if self._schema is None else self._schema.terms.schedule.seconds
            sync = StoreSync(
                incarnation, fragment, patience, hurried=lambda: self._hurried, window=window
            )
            self._under_way = sync
            reload = None
            try:
                sync.contribute()
            except ReloadError as error:
                reload = error.with_traceback(None)  # it is left to the second half of the sync
        yield sync.ready if reload is None else lambda: True
        with saying_what_to_do(incarnation, going_back=False):
            return self._finish(incarnation, sync, reload)

    def _finish(
        self, incarnation: Incarnation, sync: StoreSync, reload: ReloadError | None
    ) -> SyncReport:
        if reload is None:
            try:
                report = sync.finish()
            except ReloadError as error:
                reload = error.with_traceback(None)
        if reload is not None:
            if self.fixed:
                refuse_reload(incarnation, reload)
            start_again(incarnation, reload)
            incarnation.standing.has_loaded()
            return sync.after_reloading()
        if report.committed:
            incarnation.handover.differed = False
            if incarnation.sync % WATCH_EVERY == 0:
                watch_manifest(incarnation)
                watch_claim(incarnation)
                self._watch_unsynced(incarnation)
        return report

    @one_thread()
    def save_inner(self, parts: Callable[[str], Iterable[Buffer]]) -> None:
        """Save what belongs to this replica alone, for the next incarnation of its rank.

        See :func:`._inner.save_inner`.

        Raises:
            FencedError: A newer incarnation of this rank has taken over.
            RunExistsError: The prefix belongs to another run by now.
        """
        incarnation = self._running()
        try:
            save_inner(incarnation, parts)
        except (FencedError, RunExistsError) as error:
            self.abort(error)
            raise

    def saved_inner(self) -> Iterator[SavedInner]:
        """Return what earlier incarnations of this rank have saved, the newest first."""
        return saved(self._running(), parse_inner)

    @one_thread()
    def save_residual(self, parts: Callable[[str], Iterable[Buffer]]) -> None:
        """Save what a codec will have lost if the next contribution is counted.

        See :func:`._inner.save_residual`.
        """
        save_residual(self._running(), parts)

    def saved_residuals(self) -> Iterator[SavedInner]:
        """Return what earlier incarnations of this rank saved before contributing, newest first."""
        return saved(self._running(), parse_residual)

    def given_up(self, saved: SavedInner) -> bool:
        """Say whether the run has since given up something that the model held then.

        Also true if that cannot be told.

        Raises:
            CorruptedObjectError: The state is damaged.
        """
        return given_up_since(self._running(), saved.sync, saved.rollback())

    def shards(self, size: int) -> int:
        """The number of shards for ``size`` bytes: a multiple of the number of ranks.

        A shard is published in one piece, and several are under way at the same time.
        """
        check_size(self.store, size)
        # The gather topology needs memory for the outer state of a shard.
        near = self.store.near and self.settings.topology != "gather"
        return shards_of(size, self.world_size, near=near)

    @property
    def position(self) -> Position:
        """Return where this replica stands in the run."""
        incarnation = self._running()
        counted = [progress.positions.get(self.rank, 0) for progress in incarnation.fragments]
        return Position(
            incarnation.sync,
            sum(progress.outer_steps for progress in incarnation.fragments)
            + incarnation.manifest.first,
            max(counted, default=0),
            incarnation.rollback,
            counted,
            incarnation.standing.rate,
            incarnation.standing.seen,
            incarnation.standing.members.get(self.rank) == incarnation.epoch,
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
                    leave_run(self._incarnation, self._unsynced)
            finally:
                self._stop_beats()
                self.store.close()

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
                    tell_failure(self._incarnation, error)
                elif self._is_awaited(error):
                    committed = 0 if self._schema is None else committed_in(self._schema)
                    tell_refusal(self._store, self.rank, self._run, committed + 1, error)
            finally:
                self.store.close()
        except Exception as second:  # noqa: BLE001 - the first error matters more
            error.add_note(f"the other replicas could not be told of this failure: {second}")

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

    def check_window(self, seconds: float) -> None:
        """Refuse windows of so many seconds if replicas do not wait for each other for so long.

        Raises:
            ConfigurationError: ``sync_timeout`` is too short.
        """
        limit = self._timing.sync_timeout
        if seconds + self.settings.grace >= limit:
            raise ConfigurationError(
                f"sync_every leaves {seconds:g} s between two syncs, and grace is "
                f"{self.settings.grace:g} s, but sync_timeout is only {limit:g} s. A replica that "
                "is started while the others lack one for min_replicas contributes after all of "
                "that time, and they would have given up. Connect with a larger sync_timeout, pass "
                "fewer seconds, or use more fragments"
            )

    def _watch_unsynced(self, incarnation: Incarnation) -> None:
        """Check this replica's share of the unsynced objects.

        Each object is checked by one member, and by a different one each time, so that not all
        write the same object at once.
        """
        members = sorted(incarnation.standing.members)
        if self._unsynced is not None and self.rank in members:
            turn = (members.index(self.rank) - incarnation.sync // WATCH_EVERY) % len(members)
            self._unsynced.look(turn, len(members))

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

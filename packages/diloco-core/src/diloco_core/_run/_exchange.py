"""The exchange over an object store, with fixed or elastic membership.

Replicas may die and come back, or join late and leave.

The protocol is a log of syncs: first contributions, then one create-once record that says which of
them count. The store always holds enough to continue the run: the newest published state, and
everything that was committed after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal, cast

from diloco_protocol.telemetry import Phase

from .._arithmetic._layout import CHUNK_BYTES, shards_of
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
from .._exchange._one_thread import one_thread
from .._exchange._pending import GivenUpError, Pending, Steps
from .._exchange._report import SyncReport
from .._exchange._resumable import ResumableJob
from .._inner._file import SavedInner
from .._store._api import Buffer, Store, check_size
from .._terms._support import EVERYTHING_SENT
from .._timing import WATCH_EVERY, Timing, limits_given
from ._claims import check_claim, watch_claim, watch_manifest
from ._incarnation._incarnation import Incarnation
from ._inner import save_inner, saved
from ._joining import Member
from ._policy._ends import refuse_reload
from ._records._keys import Hint
from ._repair import read_commit
from ._round._reload import ReloadError
from ._settings import Elastic, Fixed
from ._states._rollback import given_up_since, saying_what_to_do
from ._sync._catchup import start_again
from ._sync._sync import StoreSync, stands_in


class StoreExchange(Member, Exchange):
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
        layout: How the model lies on the processes of this replica, as text; empty if it is one
            process.

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

    layout = ""

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
        timing = timing or Timing()
        if elastic is not None:
            elastic.check(world_size, timing.sync_timeout)
        settings = elastic or Fixed(world_size, timing.lost_after, resume, timing.return_within)
        super().__init__(store, rank, world_size, run_id, settings, timing, chunk_bytes)
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
            in_background=timing.in_background,
            clock=timing.clock,
            check_window=None if settings.fixed else self.check_window,
        )
        self._hurried = False
        self._first = True
        self._hinted = 0
        self._under_way: StoreSync | None = None

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
        if means and limits_given(self._timing).get("return_within"):
            raise ConfigurationError(
                "return_within= cannot be used for means, which have no state with which a rank "
                "could come back: leave it out"
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
        following = incarnation.sync + 1
        expected = incarnation.standing.members.get(incarnation.rank) == incarnation.epoch
        if not self.fixed and not expected and self._hinted != following:
            hint = Hint(following, incarnation.rank, incarnation.epoch, "join")
            incarnation.store.put(hint.key, lambda: [b"\n"])
            self._hinted = following
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
            sync = StoreSync(incarnation, fragment, patience, lambda: self._hurried, window)
            self._under_way = sync
            reload = None
            try:
                sync.contribute()
            except ReloadError as error:
                reload = error.with_traceback(None)  # it is left to the second half of the sync
        yield
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
            incarnation.doing.now(Phase.IDLE)
            return sync.after_reloading()
        if report.committed:
            incarnation.handover.differed = False
            if incarnation.sync % WATCH_EVERY == 0:
                watch_manifest(incarnation)
                watch_claim(incarnation)
        incarnation.doing.now(Phase.IDLE)
        if incarnation.takes_means and self.telemetry is not None:
            self.telemetry.synced(report)  # otherwise the outer loop completes it first
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
        return saved(self._running())

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

    def check_window(self, seconds: float) -> None:
        """Refuse windows of so many seconds if replicas do not wait for each other for so long.

        Raises:
            ConfigurationError: ``sync_timeout`` is too short.
        """
        limit = self._timing.sync_timeout
        if seconds + self.settings.grace >= limit:
            raise ConfigurationError(
                f"sync_every leaves {seconds:g} s between two syncs, and grace is "
                f"{self.settings.grace:g} s, but sync_timeout is only {limit:g} s: the others give "
                "up before a replica that joins them contributes. Connect with a larger "
                "sync_timeout, pass fewer seconds, or use more fragments"
            )

"""The exchange over an object store, with strict membership: all ranks or nothing."""

from __future__ import annotations

import contextlib
import secrets
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal

from .._arithmetic._layout import CHUNK_BYTES
from .._checks import check_identity, check_resume, check_whole
from .._errors import (
    ConfigurationError,
    CorruptedObjectError,
    ObjectNotFoundError,
    StoreError,
    SyncError,
    UnequalSyncsError,
)
from .._exchange._endings import Progress, failure
from .._exchange._one_thread import one_thread
from .._exchange._pending import GivenUpError, Syncs
from .._exchange._resumable import Position, RestartableExchange
from .._planner._warning import fragment_bytes, warn_of_long_syncs
from .._store._api import check_size
from .._store._patient import Patient
from .._terms._support import EVERYTHING_SENT
from .._timing import WATCH_EVERY, Timing
from ._beginning import begin_run
from ._claims import claim
from ._ending import leave_run, tell_failure
from ._inner import GivenUp, save_inner, saved_inner
from ._liveness import Liveness
from ._old_states import OldStates
from ._participant import Participant
from ._records._records import Claim
from ._resume._resuming import claim_next, take_up
from ._sync._sync import StoreSync

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from .._arithmetic._sync_job import SyncJob
    from .._exchange._base import Schema
    from .._exchange._pending import Pending, Steps
    from .._exchange._resumable import ResumableJob, TakenUp
    from .._inner._file import SavedInner
    from .._store._api import Buffer, Store
    from ._resume._meeting import Meeting
    from ._watch import Watch


class ObjectStoreExchange(RestartableExchange):
    """One replica's connection to a strict run over an object store; see :class:`._resumable.RestartableExchange`.

    Rank k reduces, updates and publishes the shards k, k + world_size, …. In each sync it sends its contributions to all other
    shards, and reads the contributions of the other ranks to its own. With contributions of D bytes and N replicas, it uploads
    D·(N-1)/N and its published shards (with their outer state), and downloads 2·D·(N-1)/N, for any N. To be used by one thread
    at a time; a daemon thread writes the beat.

    Args:
        store: The run's prefix.
        rank: The rank of this replica.
        world_size: Number of replicas.
        run_id: The launch that the replicas belong to; replicas of different launches refuse each other.
        timing: Limits in seconds.
        chunk_bytes: Size in bytes of each of the two buffers; must be the same for all replicas.
        resume: Whether to continue the run that the prefix holds, which has stopped. ``"newest-whole"`` permits to continue
            from an older state if the newest one is damaged.

    Raises:
        ConfigurationError: An argument is not allowed.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        *,
        run_id: str = "",
        timing: Timing | None = None,
        chunk_bytes: int = CHUNK_BYTES,
        resume: bool | Literal["newest-whole"] = False,
    ) -> None:
        check_resume(resume)
        rank, world_size = check_identity(rank, world_size)
        check_whole("chunk_bytes", chunk_bytes)
        if not isinstance(run_id, str):
            raise ConfigurationError(
                f"run_id must be text (a str), not {run_id!r} ({type(run_id).__name__})"
            )
        self.rank = rank
        self.world_size = world_size
        self.run_id = run_id
        self.store = store
        self._syncs = Syncs()
        given = timing or Timing()
        self._timing = replace(given, sleep=self._syncs.sleeping(given.sleep))
        self.support = replace(
            EVERYTHING_SENT,
            keeps_state=True,
            in_background=given.in_background,
            clock=given.clock,
        )
        self._store = Patient(store, self._timing)
        self._store.patience = self._timing.sync_timeout
        self._chunk_bytes = int(chunk_bytes)
        self._nonce = secrets.token_hex(8)
        self._liveness = Liveness(self._store, rank, world_size, self._timing, self._nonce)
        self._claim: Claim | None = None
        self._participant: Participant | None = None
        self._schema: Schema | None = None
        self._progress = Progress()
        self.resumes = bool(resume)
        self._may_go_back = resume == "newest-whole"
        self._steps = self._steps_counted = 0
        self._meeting: Meeting | None = None
        self._last: StoreSync | None = None
        self._obsolete: list[str] = []
        self._old_states = OldStates(0)
        self._watch: Watch | None = None
        self.when_ended: Callable[[], object] = bool  # called when this replica leaves or fails
        self._ended = ""

    @one_thread()
    def join(self, schema: Schema) -> None:
        """Meet the other replicas; see :meth:`._base.Exchange.join`."""
        self._check_open()
        if self._schema is not None:
            if schema != self._schema:
                raise ConfigurationError(
                    "this exchange has already joined its run with another model or other settings. "
                    "An exchange serves only one outer loop: for a second loop, connect to another prefix."
                )
            return
        warn_of_long_syncs(
            max(map(fragment_bytes, schema.fragments), default=0),
            rank=self.rank,
            replicas=self.world_size,
            store=self.store,
            sync_timeout=self._timing.sync_timeout,
            strict=True,
            outer_state=schema.outer_state,
            terms=schema.terms,
        )
        own_claim = Claim.of_this_process(
            self.rank,
            self.world_size,
            self.run_id,
            self._chunk_bytes,
            schema,
            self._nonce,
            self._timing.beat_interval,
        )
        if self.resumes:
            self._resume_run(own_claim, schema)
        else:
            self._begin_run(own_claim, schema)
        self._schema = schema
        self._old_states = OldStates(len(schema.fragments))

    def _begin_run(self, own_claim: Claim, schema: Schema) -> None:
        claim(self._store, own_claim, schema, self._timing)
        self._claim = own_claim
        with self._aborting():
            self._liveness.start()
            self._participant, self._watch = begin_run(
                self._store, own_claim, schema, self._timing, self._liveness
            )

    def _resume_run(self, own_claim: Claim, schema: Schema) -> None:
        meeting = claim_next(
            self._store,
            own_claim,
            schema,
            self._timing,
            self._liveness,
            may_go_back=self._may_go_back,
        )
        self._claim = meeting.own_claim
        with self._aborting():
            self._liveness.start()
            meeting.meet(schema)
        self._participant = Participant.of(
            meeting.claims, meeting.own_claim, self._store, self._timing, self._liveness
        )
        self._meeting = meeting

    def take_up(self, jobs: Sequence[ResumableJob], initial: Sequence[SyncJob]) -> TakenUp:
        """Load what a stopped run has published; see :meth:`._resumable.RestartableExchange.take_up`."""
        self._check_open()
        if self._participant is None or self._schema is None or self._meeting is None:
            raise SyncError("this exchange has not joined a run that it resumes")
        with self._aborting():
            resumed = take_up(
                self._participant,
                self._meeting,
                self._schema,
                jobs,
                initial,
                may_go_back=self._may_go_back,
            )
        self._participant, self._progress = resumed.participant, resumed.progress
        self._obsolete, self._watch = resumed.obsolete, resumed.watch
        self._old_states = OldStates(len(jobs), resumed.previous)
        self._steps = self._steps_counted = resumed.taken.inner_steps
        return resumed.taken

    def count(self, inner_steps: int) -> None:
        """Note how many inner steps of this rank the next sync counts."""
        self._steps = inner_steps

    @property
    def position(self) -> Position:
        """The position of this replica in the run."""
        syncs = self._progress.syncs
        return Position(syncs, syncs, self._steps_counted)

    @one_thread()
    def save_inner(self, parts: Callable[[str], Iterable[Buffer]]) -> None:
        """Save the state that belongs to this replica alone; see :meth:`._resumable.KeepingExchange.save_inner`."""
        self._check_open()
        if self._participant is not None:
            save_inner(self._participant, self._progress.number - 1, parts)

    def saved_inner(self) -> Iterator[SavedInner]:
        """The states that this rank has saved in all of its lives, the newest first."""
        if self._participant is None:
            return iter(())
        return saved_inner(self._participant, self._progress.number - self._progress.syncs)

    def given_up(self, saved: SavedInner) -> bool:
        """Whether the state was saved after a sync that does not count."""
        return isinstance(saved, GivenUp)

    @contextlib.contextmanager
    def _aborting(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.abort(error)
            raise

    def begin(self, job: SyncJob, *, last: bool = False) -> Pending:
        """Store the contribution; see :meth:`._base.Exchange.begin`."""
        self._check_open()
        if self._participant is None:
            raise SyncError(
                "this exchange has not joined its run yet: call join() before the first sync"
            )
        sync = StoreSync(self._participant, self._progress, job, self._last, self._steps)
        return self._syncs.begin(
            job.name, self._sync(sync, job), partial(self._guarded, sync, last)
        )

    @contextlib.contextmanager
    def _guarded(self, sync: StoreSync, last: bool) -> Iterator[None]:
        """Calculate in one thread, and tell the others if this replica fails.

        If it can do without this sync, only take its contribution back.
        """
        try:
            try:
                with one_thread():
                    yield
            except (CorruptedObjectError, ObjectNotFoundError) as error:
                # A run that was resumed without this replica has deleted what it does not need.
                with contextlib.suppress(StoreError):
                    sync.check_not_resumed(error)
                raise
        except BaseException as error:
            if isinstance(error, GivenUpError):
                pass  # the replica itself says what becomes of it
            elif last and isinstance(error, UnequalSyncsError):
                # This sync can never be committed, since a replica has left without contributing to it.
                self._store.delete(sync.contributed)
            else:
                self.abort(error)
            raise

    def _sync(self, sync: StoreSync, job: SyncJob) -> Steps:
        sync.contribute()
        yield sync.ready
        report = sync.finish(self._obsolete)
        self._obsolete = [*sync.contributed, *self._old_states.supersede(sync.superseded)]
        self._last = sync
        self._progress = self._progress.plus(job.kind)
        self._steps_counted = self._steps
        if self._watch is not None and self._progress.number % WATCH_EVERY == 0:
            self._watch.look_at_manifest()
        return report

    def shards(self, size: int) -> int:
        """The number of shards: one per replica."""
        check_size(self.store, size)
        return self.world_size

    @property
    def ended(self) -> bool:
        """Whether this replica has left its run or failed."""
        return bool(self._ended)

    def give_up(self) -> None:
        """Make a sync that another thread carries out end soon; see :meth:`._base.Exchange.give_up`."""
        self._syncs.interrupt()

    @one_thread()
    def leave(self) -> None:
        """Tell the others that this replica is done; repeatable."""
        if not self._ended:
            self._syncs.check("this replica cannot leave")
            self._end("left its run")
            try:
                if self._claim is not None:
                    leave_run(
                        self._store,
                        self._claim,
                        self._timing,
                        self._liveness,
                        self._progress,
                        self._watch,
                    )
            finally:
                self.store.close()

    def abort(self, error: BaseException) -> None:
        """Tell the others that this replica has failed; repeatable, never raises."""
        self._syncs.give_up()
        if self._ended:
            return
        ending = failure(self.rank, self._progress, error)
        self._end(f"failed ({ending.message})")
        tell_failure(
            self._store,
            self._claim,
            self._timing,
            self._liveness,
            ending,
            error,
            self._watch,
            resumes=self.resumes,
        )
        with contextlib.suppress(Exception):
            self.store.close()

    def _end(self, how: str) -> None:
        self._ended = how
        self.when_ended()
        self._last = None
        self._liveness.stop()

    def _check_open(self) -> None:
        if self._ended:
            raise SyncError(
                f"this exchange has ended: it has {self._ended}. Start a new run on a new prefix."
            )

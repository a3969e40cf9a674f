"""The exchange over an object store, with strict membership: all ranks or nothing.

Keys below the run's prefix::

    manifest.json              what this run is, for people and tools (written by rank 0)
    manifests/{life}.json      the same for a later life of the run, and which syncs of the lives before it count
    claims/{rank}.json         which process has taken the rank; written once
    meetings/{rank}.{life}.json    which processes a process sees that resumes the run
    schemas/{digest}.json      the tensors and settings that a claim refers to; replicas that agree write the same object
    beats/{rank}               a counter that shows that the rank is alive
    notes/{rank}.json          how the rank ended: "left" or "failed", and which other rank caused its failure
    deltas/{sync}/{rank}.{run}.{fingerprint}.{groups}.safetensors    a contribution; never changed, deleted when all have used it
    commits/{sync}.{run}.json  who is in the sync; written after all contributions
    state/{sync}/{shard}.{run}.safetensors             new parameters and outer state: the checkpoint
    inner/{rank}/{sync}.{run}.safetensors             what belongs to one rank alone; the newest two stay
    unsynced/{nonce}/{number}.safetensors             what belongs to the model and is not synced; written once by rank 0
    requests/{sync}/{shard}.{rank}                    the rank has found the shard damaged; the shard's owner writes it again

In later lives of a run that was stopped and resumed, the keys of claims, beats and notes are ``{rank}.{life}`` instead of
``{rank}``, where the life is the number of the process among those of its rank.

Records are sealed (:mod:`._sealed`), and payloads carry checksums. Any other object below the prefix is ignored.

Each rank writes only its own keys, except for schemas and commit records, which are the same bytes whichever rank writes
them. So no conditional write is needed, and no rank ever decides anything by itself. Everyone who may write below the prefix
is trusted.
"""

from __future__ import annotations

import contextlib
import secrets
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal

from .._arithmetic._layout import CHUNK_BYTES
from .._arithmetic._sharded import Scratch
from .._arithmetic._sync_job import SyncJob
from .._checks import check_identity, check_resume, check_whole
from .._errors import (
    ConfigurationError,
    CorruptedObjectError,
    ObjectNotFoundError,
    RunExistsError,
    StoreError,
    SyncError,
    UnequalSyncsError,
)
from .._exchange._base import Schema
from .._exchange._endings import Ending, Progress, failure
from .._exchange._pending import Syncs
from .._exchange._resumable import Position, RestartableExchange, TakenUp
from .._model._unsynced_watch import UnsyncedWatch
from .._planner._warning import fragment_bytes, warn_of_long_syncs
from .._store._api import check_size
from .._store._patient import Patient
from .._timing import Timing
from ._inner import save_inner, saved_inner
from ._liveness import Liveness
from ._manifest import MANIFEST, Manifest
from ._participant import Participant
from ._records import Claim, claim_key, noted, run_name
from ._rendezvous import check_not_resumed, claim, meet, watch_own
from ._resume._base import check_fits, find_run
from ._resume._ended import check_ended, check_not_claimed, next_life
from ._resume._meeting import Meeting, claim_again
from ._resume._take_up import Loader
from ._sync._sync import StoreSync

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from .._exchange._pending import Pending, Steps
    from .._exchange._resumable import ResumableJob
    from .._inner._state import SavedInner
    from .._store._api import Buffer, Store

_TELL_SECONDS = 10.0


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
        self._timing = timing or Timing()
        self._store = Patient(store, self._timing)
        self._store.patience = self._timing.sync_timeout
        self._chunk_bytes = int(chunk_bytes)
        self._nonce = secrets.token_hex(8)
        self._liveness = Liveness(self._store, rank, world_size, self._timing, self._nonce)
        self._claim: Claim | None = None
        self._participant: Participant | None = None
        self._schema: Schema | None = None
        self._progress = Progress()
        self._syncs = Syncs()
        self.resumes = bool(resume)
        self._may_go_back = resume == "newest-whole"
        self._steps = self._steps_counted = 0
        self._claims: list[Claim] = []
        self._meeting: Meeting | None = None
        self._last: StoreSync | None = None
        self._obsolete: list[str] = []
        self._unsynced: UnsyncedWatch | None = None
        self.when_ended: Callable[[], object] = bool  # called when this replica leaves or fails
        self._ended = ""

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
        )
        if self.resumes:
            self._meet_again(schema)
        else:
            self._meet(schema)
        self._schema = schema

    def _meet(self, schema: Schema) -> None:
        """Begin a run."""
        store, timing, liveness = self._store, self._timing, self._liveness
        own_claim = self._new_claim(schema, 1)
        claim(store, own_claim, schema, timing)
        self._claim = own_claim
        with self._aborting():
            liveness.start()
            self._claims = meet(
                store,
                own_claim,
                schema,
                timing,
                liveness.check_failures,
                lambda other: liveness.know(other.rank, other.nonce),
            )
            run = run_name(self._claims)
            if self.rank == 0:
                unsynced = {} if schema.unsynced is None else schema.unsynced.publish(self._put)
                manifest = Manifest(
                    self.run_id,
                    run,
                    self.world_size,
                    schema.settings,
                    schema.tensors,
                    schema.fragments,
                    unsynced,
                    [(claim.life, claim.nonce) for claim in self._claims],
                )
                store.put(MANIFEST, lambda: [manifest.to_bytes()])
                self._unsynced = UnsyncedWatch(store, timing, self.rank, unsynced, schema.unsynced)
        self._participant = self._participant_of(run, own_claim)

    def _meet_again(self, schema: Schema) -> None:
        """Continue a run that has stopped."""
        store, timing, liveness = self._store, self._timing, self._liveness
        noted_before = noted(store.list("notes/"))
        manifest = find_run(store, timing, may_go_back=self._may_go_back)
        check_fits(manifest, schema, self.rank, self.world_size, store.uri)
        life = next_life(store, manifest, self.rank)
        check_ended(store, timing, manifest, self.rank, life)
        check_not_claimed(store, manifest, self.rank, life)
        own_claim = self._new_claim(schema, life)
        claim_again(store, own_claim, schema, timing)
        self._claim = own_claim
        liveness.life = life
        with self._aborting():
            liveness.start()
            self._meeting = Meeting(store, own_claim, manifest, timing, liveness, noted_before)
            self._claims = self._meeting.meet(schema)
        self._participant = self._participant_of(run_name(self._claims), own_claim)

    def take_up(self, jobs: Sequence[ResumableJob], initial: Sequence[SyncJob]) -> TakenUp:
        """Load what a stopped run has published; see :meth:`._resumable.RestartableExchange.take_up`."""
        self._check_open()
        if self._participant is None or self._schema is None or self._meeting is None:
            raise SyncError("this exchange has not joined a run that it resumes")
        with self._aborting():
            loader = Loader(self._participant, self._claims, jobs, initial)
            if self.rank == 0:
                manifest = loader.choose(self._schema, self.run_id, may_go_back=self._may_go_back)
                self._unsynced = UnsyncedWatch(
                    self._store, self._timing, 0, manifest.unsynced, self._schema.unsynced
                )
            else:
                manifest = loader.obey(self._liveness, self._meeting)
            self._participant = replace(self._participant, earlier=manifest.earlier)
            taken, self._obsolete = loader.load(manifest)
        _, sync = manifest.earlier[-1]
        self._progress = Progress(sync + 1, sync + 1 - len(jobs))
        self._steps = self._steps_counted = taken.inner_steps
        return taken

    def count(self, inner_steps: int) -> None:
        """Note how many inner steps of this rank the next sync counts."""
        self._steps = inner_steps

    @property
    def position(self) -> Position:
        """The position of this replica in the run."""
        syncs = self._progress.syncs
        return Position(syncs, syncs, self._steps_counted)

    def save_inner(self, parts: Callable[[str], Iterable[Buffer]]) -> None:
        """Save the state that belongs to this replica alone; see :meth:`._resumable.KeepingExchange.save_inner`."""
        self._check_open()
        if self._participant is not None:
            save_inner(self._participant, self._progress.number - 1, parts)

    def saved_inner(self) -> Iterator[SavedInner]:
        """The states that this rank has saved in the lives of the run, the newest first."""
        if self._participant is None:
            return iter(())
        return saved_inner(self._participant, self._progress.number - self._progress.syncs)

    def given_up(self, sync: int, rollback: int) -> bool:  # noqa: ARG002 - the signature of KeepingExchange
        """Always false: :meth:`saved_inner` leaves out what was saved after syncs that do not count."""
        return False

    def _new_claim(self, schema: Schema, life: int) -> Claim:
        return Claim.of_this_process(
            self.rank,
            self.world_size,
            self.run_id,
            self._chunk_bytes,
            schema,
            self._nonce,
            life,
        )

    @contextlib.contextmanager
    def _aborting(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.abort(error)
            raise

    def _participant_of(self, run: str, own_claim: Claim) -> Participant:
        return Participant(
            self._store,
            self.rank,
            self.world_size,
            run,
            self._timing,
            self._liveness,
            self._chunk_bytes,
            Scratch(self._chunk_bytes),
            partial(watch_own, self._store, own_claim, self._timing),
            partial(check_not_resumed, self._store, own_claim),
        )

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
        """Tell the others if this replica fails. If it can do without this sync, only take its contribution back."""
        try:
            try:
                yield
            except (CorruptedObjectError, ObjectNotFoundError) as error:
                # A run that was resumed without this replica has deleted what it does not need.
                with contextlib.suppress(StoreError):
                    self._check_not_resumed(error)
                raise
        except BaseException as error:
            if last and isinstance(error, UnequalSyncsError):
                # This sync can never be committed, since a replica has left without contributing to it.
                self._store.delete(sync.contributed)
            else:
                self.abort(error)
            raise

    def _check_not_resumed(self, cause: StoreError) -> None:
        if self._participant is None:
            return
        try:
            self._participant.check_not_resumed()
        except RunExistsError as error:
            raise error from cause

    def _sync(self, sync: StoreSync, job: SyncJob) -> Steps:
        sync.contribute()
        yield sync.ready
        report = sync.finish(self._obsolete)
        self._obsolete = sync.obsolete_keys()
        self._last = sync
        self._progress = self._progress.plus(job.kind)
        self._steps_counted = self._steps
        return report

    def shards(self, size: int) -> int:
        """The number of shards: one per replica."""
        check_size(self.store, size)
        return self.world_size

    @property
    def ended(self) -> bool:
        """Whether this replica has left its run or failed."""
        return bool(self._ended)

    def leave(self) -> None:
        """Tell the others that this replica is done; repeatable."""
        if not self._ended:
            self._syncs.check("this replica cannot leave")
            self._ended = "left its run"
            self.when_ended()
            self._last = None
            self._liveness.stop()
            try:
                if self._is_claimed():
                    self._liveness.tell(Ending(self.rank, "left", self._progress))
                    if self._unsynced is not None:
                        self._unsynced.look()
            finally:
                self.store.close()

    def abort(self, error: BaseException) -> None:
        """Tell the others that this replica has failed; repeatable, never raises."""
        self._syncs.give_up()
        if self._ended:
            return
        ending = failure(self.rank, self._progress, error)
        self._ended = f"failed ({ending.message})"
        self.when_ended()
        self._last = None
        self._liveness.stop()
        # If the store cannot be reached, waiting for it once more would only delay the error.
        self._store.patience = min(self._store.patience, _TELL_SECONDS)
        try:
            if self._is_ours(error):
                self._liveness.tell(ending)
        except Exception as telling_error:  # noqa: BLE001 - the first error is the one to report
            error.add_note(f"the other replicas could not be told of this failure: {telling_error}")
        with contextlib.suppress(Exception):
            self.store.close()

    def _put(self, key: str, parts: Callable[[], Iterable[Buffer]]) -> None:
        self._store.put(key, parts)

    def _is_ours(self, error: BaseException) -> bool:
        """Whether this replica may write a note for its rank: it holds the rank, or no process does.

        A note must not end a run that another process takes part in.
        """
        if self._claim is not None:
            return self._is_claimed()
        if self.resumes:
            return False  # nobody has seen this process, and the run may be that of others
        return (
            not isinstance(error, RunExistsError) and self._store.get(claim_key(self.rank)) is None
        )

    def _is_claimed(self) -> bool:
        """Whether this replica still holds its rank: a process of an earlier run must not end a later one."""
        if self._claim is None:
            return False
        try:
            watch_own(self._store, self._claim, self._timing)
        except RunExistsError:
            return False
        return True

    def _check_open(self) -> None:
        if self._ended:
            raise SyncError(
                f"this exchange has ended: it has {self._ended}. Start a new run on a new prefix."
            )

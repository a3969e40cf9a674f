"""The exchange between threads of one process: for simulations, notebooks and tests. Same arithmetic, no store."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from .._arithmetic._layout import CHUNK_BYTES
from .._arithmetic._reduction import reduce_shards
from .._arithmetic._sent import as_sent
from .._arithmetic._sharded import Scratch, adopt_shard, contributions
from .._arithmetic._sync_job import SyncJob
from .._checks import check_whole
from .._errors import (
    ConfigurationError,
    MismatchError,
    RendezvousTimeoutError,
    SyncError,
    SyncTimeoutError,
    UnequalSyncsError,
)
from .._timing import Timing
from ._base import Exchange, Schema
from ._endings import Ending, Progress, conclude, describe, failure
from ._pending import Syncs
from ._report import SyncReport
from ._schemas import compare_schemas

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from .._arithmetic._layout import Piece
    from ._pending import Pending, Steps


def in_process(
    world_size: int, *, timing: Timing | None = None, chunk_bytes: int = CHUNK_BYTES
) -> list[InProcessExchange]:
    """Exchanges for ``world_size`` replicas that are threads of this process, in rank order.

    Args:
        world_size: Number of replicas; each thread takes one of the exchanges.
        timing: Limits in seconds. Its clock measures what the reports say; its sleep is not used.
        chunk_bytes: Size of the buffers of each replica.

    Raises:
        ConfigurationError: ``world_size`` or ``chunk_bytes`` is not a whole number of at least 1.
    """
    check_whole("world_size", world_size)
    check_whole("chunk_bytes", chunk_bytes)
    hub = _Hub(int(world_size))
    return [
        InProcessExchange(hub, rank, timing or Timing(), chunk_bytes)
        for rank in range(hub.world_size)
    ]


class _Hub:
    """Where the threads meet: in every round each puts a value down and takes everybody's."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.changed = threading.Condition()
        self.rounds: dict[tuple[str, int], dict[int, object]] = {}
        self.endings: dict[int, Ending] = {}

    def arrive(self, rank: int, what: str, progress: Progress, value: object) -> None:
        """Put a value down for the others; once per round."""
        with self.changed:
            self.rounds.setdefault((what, progress.number), {})[rank] = value
            self.changed.notify_all()

    def settled(self, what: str, progress: Progress) -> bool:
        """Whether nobody is to be waited for in a round any more: all are there, or one has ended without it."""
        with self.changed:
            arrived = self.rounds[what, progress.number]
            return len(arrived) == self.world_size or any(
                other not in arrived for other in self.endings
            )

    def meet(
        self, rank: int, what: str, progress: Progress, value: object, timeout: float
    ) -> list[Any]:
        """Everybody's values in rank order. Raises ``_Missing`` after ``timeout`` seconds."""
        self.arrive(rank, what, progress, value)
        with self.changed:
            arrived = self.rounds[what, progress.number]
            self.changed.wait_for(partial(self.settled, what, progress), timeout)
            missing = [other for other in range(self.world_size) if other not in arrived]
            if not missing:
                # The round is kept until the next one of its kind is complete: slower threads still look at it.
                self.rounds.pop((what, progress.number - 1), None)
                return [arrived[other] for other in range(self.world_size)]
            error = conclude(self.endings, missing, rank, progress)
            if error is not None:
                raise error
            raise _Missing(missing)

    def end(self, ending: Ending) -> None:
        with self.changed:
            self.endings.setdefault(ending.rank, ending)
            self.changed.notify_all()


class _Missing(Exception):  # noqa: N818 - never leaves this file
    def __init__(self, ranks: list[int]) -> None:
        self.ranks = ranks


class InProcessExchange(Exchange):
    """One thread's side; see :class:`._base.Exchange` and :func:`in_process`."""

    def __init__(self, hub: _Hub, rank: int, timing: Timing, chunk_bytes: int) -> None:
        self.rank = rank
        self.world_size = hub.world_size
        self._hub = hub
        self._timing = timing
        self._chunk_bytes = chunk_bytes
        self._scratch = Scratch(chunk_bytes)
        self._schema: Schema | None = None
        self._progress = Progress()
        self._syncs = Syncs()
        self._ended = False

    def join(self, schema: Schema) -> None:
        """Meet the other threads; see :meth:`._base.Exchange.join`."""
        if self._schema is None:
            try:
                schemas = self._hub.meet(
                    self.rank, "join", self._progress, schema, self._timing.join_timeout
                )
            except _Missing as missing:
                raise RendezvousTimeoutError(
                    f"the threads of ranks {missing.ranks} did not join within {self._timing.join_timeout:g} s",
                    missing.ranks,
                ) from None
            for rank, other in enumerate(schemas):
                compare_schemas(f"rank {self.rank}", schema, f"rank {rank}", other)
            self._schema = schema
        elif schema != self._schema:
            raise ConfigurationError(
                "this exchange has already joined with another model or other settings"
            )

    def begin(self, job: SyncJob, *, last: bool = False) -> Pending:
        """Put the contribution down for the others; see :meth:`._base.Exchange.begin`."""
        if self._schema is None or self._ended:
            raise SyncError(
                "this exchange has ended" if self._ended else "join() comes before the first sync"
            )
        return self._syncs.begin(job.name, self._sync(job), partial(self._guarded, last))

    def shards(self, size: int) -> int:  # noqa: ARG002 - the protocol's signature
        """The number of shards: one per replica."""
        return self.world_size

    def leave(self) -> None:
        """Tell the others that this replica is done; repeatable."""
        if not self._ended:
            self._syncs.check("this replica cannot leave")
            self._ended = True
            self._hub.end(Ending(self.rank, "left", self._progress))

    def abort(self, error: BaseException) -> None:
        """Tell the others that this replica has failed; repeatable, never raises."""
        self._syncs.give_up()
        if not self._ended:
            self._ended = True
            self._hub.end(failure(self.rank, self._progress, error))

    @contextmanager
    def _guarded(self, last: bool) -> Iterator[None]:
        """Whoever fails tells the others; who can do without the sync just leaves."""
        try:
            yield
        except BaseException as error:
            if not (last and isinstance(error, UnequalSyncsError)):
                self.abort(error)
            raise

    def _sync(self, job: SyncJob) -> Steps:
        clock = self._timing.clock
        layout, start = job.layout, clock()
        for shard in range(layout.shards):
            for _ in contributions(job, shard, self.rank, self._chunk_bytes, self._scratch):
                pass
        self._hub.arrive(self.rank, "contribute", self._progress, job)
        busy = clock() - start
        yield partial(self._hub.settled, "contribute", self._progress)
        start = clock() - busy  # what was done between the halves is no part of the sync
        ready = clock()
        jobs = self._meet("contribute", job)
        waited = clock() - ready
        for rank, other in enumerate(jobs):
            if other.fingerprint != job.fingerprint:
                raise MismatchError(
                    f"in {self._what(job)}, rank {rank} contributes other tensors than rank {self.rank}: all replicas must "
                    "sync the same tensors, with the same shapes and dtypes, in the same order"
                )
        own = range(self.rank, layout.shards, self.world_size)
        for shard in own:
            sources = [as_sent(other) for other in jobs]
            reduce_shards(
                job, [shard], sources, self._chunk_bytes, self._scratch, sync=self._progress.next
            )
        ready = clock()
        self._meet("reduce", job)
        waited += clock() - ready
        moved = 0
        for shard in range(layout.shards):
            if shard not in own:
                owner = jobs[shard % self.world_size]
                adopt_shard(job, shard, partial(_copy, owner), self._chunk_bytes, self._scratch)
                moved += sum(layout.piece_bytes(piece) for piece in layout.shard(shard))
        ready = clock()
        self._meet(
            "adopt", job
        )  # what is published may be the caller's own tensor, who is free to change it now
        waited += clock() - ready
        number, self._progress = self._progress.number, self._progress.plus(job.kind)
        return SyncReport(
            sync=number,
            fragment=job.name,
            committed=True,
            members=self.world_size,
            bytes_sent=0,
            bytes_received=moved,
            wait_seconds=waited,
            exchange_seconds=clock() - start - waited,
        )

    def _meet(self, what: str, job: SyncJob) -> list[SyncJob]:
        try:
            jobs: list[SyncJob] = self._hub.meet(
                self.rank, what, self._progress, job, self._timing.sync_timeout
            )
        except _Missing as missing:
            raise SyncTimeoutError(
                f"{self._what(job)} was not completed within {self._timing.sync_timeout:g} s; "
                f"waiting for the threads of ranks {missing.ranks}. Raise sync_timeout if they are only slow.",
                missing.ranks,
            ) from None
        return jobs

    def _what(self, job: SyncJob) -> str:
        return describe(job.kind, job.name, self._progress)


def _copy(owner: SyncJob, piece: Piece, out: torch.Tensor) -> torch.Tensor:
    return out.copy_(owner.published(piece))

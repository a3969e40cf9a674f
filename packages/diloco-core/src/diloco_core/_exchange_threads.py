"""The exchange between threads of one process: for simulations, notebooks and tests. Same arithmetic, no store."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Any

from ._errors import (
    ConfigurationError,
    MismatchError,
    RendezvousTimeoutError,
    ReplicaLostError,
    SyncError,
    SyncTimeoutError,
    UnequalSyncsError,
)
from ._exchange import CHUNK_BYTES, Schema, SyncJob, SyncReport
from ._rendezvous import compare_schemas
from ._sharded import Scratch, adopt_shard, contributions, reduce_shard
from ._timing import Timing

if TYPE_CHECKING:
    import torch

    from ._layout import Piece


def in_process(
    world_size: int, *, timing: Timing | None = None, chunk_bytes: int = CHUNK_BYTES
) -> list[InProcessExchange]:
    """Exchanges for ``world_size`` replicas that are threads of this process, in rank order.

    Args:
        world_size: Number of replicas; each thread takes one of the exchanges.
        timing: Limits in seconds (its clock and sleep are not used).
        chunk_bytes: Size of the buffers of each replica.

    Raises:
        ConfigurationError: ``world_size`` is less than 1.
    """
    if world_size < 1:
        raise ConfigurationError(f"world_size must be at least 1, not {world_size}")
    hub = _Hub(world_size)
    return [InProcessExchange(hub, rank, timing or Timing(), chunk_bytes) for rank in range(world_size)]


class _Hub:
    """Where the threads meet: in every round each puts something down and takes everybody's."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.changed = threading.Condition()
        self.rounds: dict[tuple[str, int], dict[int, object]] = {}
        self.gone: dict[int, SyncError] = {}

    def meet(self, rank: int, what: str, number: int, thing: object, timeout: float) -> list[Any]:
        """Everybody's things in rank order. Raises ``_Missing`` after ``timeout`` seconds."""
        key = (what, number)
        with self.changed:
            here = self.rounds.setdefault(key, {})
            here[rank] = thing
            self.changed.notify_all()

            def settled() -> bool:
                return len(here) == self.world_size or any(other not in here for other in self.gone)

            self.changed.wait_for(settled, timeout)
            if len(here) == self.world_size:
                # The round is kept until the next one of its kind is complete: slower threads still look at it.
                self.rounds.pop((what, number - 1), None)
                return [here[r] for r in range(self.world_size)]
            for other, error in self.gone.items():
                if other not in here:
                    raise error
            raise _Missing([r for r in range(self.world_size) if r not in here])

    def end(self, rank: int, error: SyncError) -> None:
        with self.changed:
            self.gone.setdefault(rank, error)
            self.changed.notify_all()


class _Missing(Exception):  # noqa: N818 - never leaves this file
    def __init__(self, ranks: list[int]) -> None:
        self.ranks = ranks


class InProcessExchange:
    """One thread's side; see :class:`._exchange.Exchange` and :func:`in_process`."""

    def __init__(self, hub: _Hub, rank: int, timing: Timing, chunk_bytes: int) -> None:
        self.rank = rank
        self.world_size = hub.world_size
        self._hub = hub
        self._timing = timing
        self._chunk_bytes = chunk_bytes
        self._scratch = Scratch(chunk_bytes)
        self._schema: Schema | None = None
        self._syncs = 0
        self._ended = False

    def join(self, schema: Schema) -> None:
        """Meet the other threads; see :meth:`._exchange.Exchange.join`."""
        if self._schema is None:
            try:
                schemas = self._hub.meet(self.rank, "join", 0, schema, self._timing.join_timeout)
            except _Missing as missing:
                raise RendezvousTimeoutError(
                    f"the threads of ranks {missing.ranks} did not join within {self._timing.join_timeout:g} s",
                    missing.ranks,
                ) from None
            for rank, other in enumerate(schemas):
                compare_schemas(self.rank, schema, rank, other)
            self._schema = schema
        elif schema != self._schema:
            raise ConfigurationError("this exchange has already joined with another model or other settings")

    def sync(self, job: SyncJob) -> SyncReport:
        """Contribute, reduce, update, adopt; see :meth:`._exchange.Exchange.sync`."""
        if self._schema is None or self._ended:
            raise SyncError("this exchange has ended" if self._ended else "join() comes before the first sync")
        try:
            report = self._sync(job)
        except BaseException as error:
            self.abort(error)
            raise
        self._syncs += 1
        return report

    def shards(self, size: int) -> int:  # noqa: ARG002 - the protocol's signature
        """One for every replica."""
        return self.world_size

    def leave(self) -> None:
        """Tell the others that this replica is done; repeatable."""
        if not self._ended:
            self._ended = True
            text = f"rank {self.rank} has finished after {self._syncs} syncs, others go on"
            self._hub.end(self.rank, UnequalSyncsError(text, self.rank))

    def abort(self, error: BaseException) -> None:
        """Tell the others that this replica has failed; repeatable, never raises."""
        if not self._ended:
            self._ended = True
            text = f"rank {self.rank} failed after {self._syncs} syncs: {type(error).__name__}: {error}"
            self._hub.end(self.rank, ReplicaLostError(text, self.rank))

    def _sync(self, job: SyncJob) -> SyncReport:
        clock = self._timing.clock
        layout, start = job.layout, clock()
        for shard in range(layout.shards):
            for _ in contributions(job, shard, self.rank, self._chunk_bytes, self._scratch):
                pass
        ready = clock()
        jobs = self._meet("contribute", job)
        waited = clock() - ready
        for rank, other in enumerate(jobs):
            if other.fingerprint != job.fingerprint:
                raise MismatchError(
                    f"in sync {self._syncs}, rank {rank} contributes something else than rank {self.rank} ({job.name})"
                )
        own = range(self.rank, layout.shards, self.world_size)
        for shard in own:
            sources = [other.contribution for other in jobs]
            reduce_shard(job, shard, sources, self._chunk_bytes, self._scratch, sync=self._syncs)
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
        self._meet("adopt", job)  # what is published may be the caller's own tensor, who is free to change it now
        waited += clock() - ready
        return SyncReport(
            sync=self._syncs,
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
            jobs: list[SyncJob] = self._hub.meet(self.rank, what, self._syncs, job, self._timing.sync_timeout)
        except _Missing as missing:
            raise SyncTimeoutError(
                f"sync {self._syncs} was not completed within {self._timing.sync_timeout:g} s; "
                f"waiting for the threads of ranks {missing.ranks}",
                missing.ranks,
            ) from None
        return jobs


def _copy(owner: SyncJob, piece: Piece, out: torch.Tensor) -> torch.Tensor:
    return out.copy_(owner.published(piece))

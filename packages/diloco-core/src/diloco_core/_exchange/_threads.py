"""The exchange between threads of one process: the same arithmetic without a store.

It is for simulations, notebooks and tests.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from .._arithmetic._contribution import Contribution
from .._arithmetic._layout import CHUNK_BYTES, Piece
from .._arithmetic._reduction import reduce_shards
from .._arithmetic._sharded import adopt_shard, as_sent
from .._arithmetic._sync_job import SyncJob
from .._checks import whole
from .._errors import RendezvousTimeoutError, SyncTimeoutError, UnequalSyncsError
from .._terms._support import EVERYTHING_SENT
from .._timing import Timing
from ._base import Schema
from ._endings import Ending, Progress, conclude, failure, named_ranks
from ._in_memory import ExchangeInMemory
from ._pending import GivenUpError, Pending, Steps


def in_process(
    world_size: int, *, timing: Timing | None = None, chunk_bytes: int = CHUNK_BYTES
) -> list[InProcessExchange]:
    """Exchanges for ``world_size`` replicas that are threads of this process, in rank order.

    Args:
        world_size: Number of replicas; each thread takes one of the exchanges.
        timing: ``join_timeout`` and ``sync_timeout`` in seconds; other limits are refused. Its
            clock measures the times in reports; its sleep is not used.
        chunk_bytes: Size in bytes of each replica's buffers.

    Raises:
        ConfigurationError: ``world_size`` or ``chunk_bytes`` is not a whole number of at least 1,
            or ``timing`` holds a limit that has no effect.
    """
    hub = _Hub(whole("world_size", world_size))
    return [
        InProcessExchange(hub, rank, timing or Timing(), chunk_bytes)
        for rank in range(hub.world_size)
    ]


class _Hub:
    """The meeting point of the threads.

    In each round, every thread leaves a value, and takes the values of all.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.changed = threading.Condition()
        self.rounds: dict[tuple[str, int], dict[int, object]] = {}
        self.endings: dict[int, Ending] = {}

    def arrive(self, rank: int, round_name: str, progress: Progress, value: object) -> None:
        """Leave a value for the others; once per round."""
        with self.changed:
            self.rounds.setdefault((round_name, progress.number), {})[rank] = value
            self.changed.notify_all()

    def settled(self, round_name: str, progress: Progress) -> bool:
        """Say whether waiting in a round is of no use any more.

        All threads have arrived, or one has ended without arriving.
        """
        with self.changed:
            arrived = self.rounds[round_name, progress.number]
            return len(arrived) == self.world_size or any(
                other not in arrived for other in self.endings
            )

    def meet(
        self,
        rank: int,
        round_name: str,
        progress: Progress,
        value: object,
        timeout: float,
        late: Callable[[list[int]], Exception],
        unwanted: Callable[[], bool] = bool,
    ) -> list[Any]:
        """Leave a value, and return the values of all in rank order.

        Raises what ``late`` makes of the missing ranks after ``timeout`` seconds, and as soon as
        ``unwanted`` is true when ``changed`` is notified.
        """
        self.arrive(rank, round_name, progress, value)
        with self.changed:
            arrived = self.rounds[round_name, progress.number]
            self.changed.wait_for(lambda: self.settled(round_name, progress) or unwanted(), timeout)
            missing = [other for other in range(self.world_size) if other not in arrived]
            if not missing:
                # A round is kept until the next one of the same name is complete, since slower
                # threads still read it.
                self.rounds.pop((round_name, progress.number - 1), None)
                return [arrived[other] for other in range(self.world_size)]
            error = conclude(self.endings, missing, rank, progress)
            if error is not None:
                raise error
            raise late(missing)

    def end(self, ending: Ending) -> None:
        with self.changed:
            self.endings.setdefault(ending.rank, ending)
            self.changed.notify_all()


class InProcessExchange(ExchangeInMemory):
    """The exchange of one thread; see :class:`._base.Exchange` and :func:`in_process`."""

    _limits = ("join_timeout", "sync_timeout")

    def __init__(self, hub: _Hub, rank: int, timing: Timing, chunk_bytes: int) -> None:
        super().__init__(rank, hub.world_size, timing, chunk_bytes)
        self._hub = hub
        self.support = replace(
            EVERYTHING_SENT, in_background=timing.in_background, clock=timing.clock
        )

    def _schemas(self, schema: Schema) -> tuple[Schema, list[Schema]]:
        limit = self._timing.join_timeout

        def late(missing: list[int]) -> RendezvousTimeoutError:
            return RendezvousTimeoutError(
                f"not all replicas joined within {limit:g} s; missing: {named_ranks(missing)}. "
                f"Each of the {self.world_size} exchanges needs a thread of its own.",
                missing,
            )

        return schema, self._hub.meet(self.rank, "join", self._progress, schema, limit, late)

    def begin(self, job: SyncJob, *, last: bool = False) -> Pending:
        """Leave the contribution for the others; see :meth:`._base.Exchange.begin`."""
        return self._begun(job, partial(self._guarded, last))

    def give_up(self) -> None:
        """Make a sync in another thread end soon; see :meth:`._base.Exchange.give_up`."""
        self._syncs.interrupt()
        with self._hub.changed:
            self._hub.changed.notify_all()

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
        """Tell the others if this replica fails, unless it can do without this sync."""
        try:
            yield
        except BaseException as error:
            if not (
                (last and isinstance(error, UnequalSyncsError)) or isinstance(error, GivenUpError)
            ):
                self.abort(error)
            raise

    def _sync(self, job: SyncJob) -> Steps:
        clock = self._timing.clock
        layout, start = job.layout, clock()
        # What it contributes is noted now, since a job belongs to its own thread.
        self._prepare(job)
        contributed = (job, job.contribution)
        self._hub.arrive(self.rank, "contribute", self._progress, contributed)
        busy = clock() - start
        yield
        start = clock() - busy  # the time between the two halves does not count
        ready = clock()
        met: list[tuple[SyncJob, Contribution]] = self._meet("contribute", job, contributed)
        jobs = [other for other, _ in met]
        waited = clock() - ready
        self._settle(job, [other.fingerprint for other in jobs], [each for _, each in met])
        own_shards = range(self.rank, layout.shards, self.world_size)
        for shard in own_shards:
            reduce_shards(
                job,
                [shard],
                self._clipped([as_sent(other) for other in jobs]),
                self._chunk_bytes,
                self._scratch,
                sync=self._progress.next,
                shares=self._shares,
            )
        ready = clock()
        self._meet("reduce", job, job)
        waited += clock() - ready
        bytes_read = 0
        for shard in range(layout.shards):
            if shard not in own_shards:
                owner = jobs[shard % self.world_size]
                adopt_shard(job, shard, partial(_copy, owner), self._chunk_bytes, self._scratch)
                bytes_read += sum(layout.piece_bytes(piece) for piece in layout.shard(shard))
        ready = clock()
        # Published values may be the caller's own tensors, which it may change as soon as this
        # returns: wait for all readers.
        self._meet("adopt", job, job)
        waited += clock() - ready
        return self._finished(job, sent=0, received=bytes_read, waited=waited, since=start)

    def _meet(self, round_name: str, job: SyncJob, value: object) -> list[Any]:
        limit = self._timing.sync_timeout

        def late(missing: list[int]) -> SyncTimeoutError:
            self._syncs.check_interrupted()
            return SyncTimeoutError(
                f"{self._describe(job)} was not completed within {limit:g} s; it was still waiting "
                f"for {named_ranks(missing)}. If their threads are only slow, raise sync_timeout.",
                missing,
            )

        unwanted = self._syncs.interrupted
        return self._hub.meet(self.rank, round_name, self._progress, value, limit, late, unwanted)


def _copy(owner: SyncJob, piece: Piece, out: torch.Tensor) -> torch.Tensor:
    return out.copy_(owner.published(piece))

"""The exchange over a ``torch.distributed`` process group, for replicas that share a network.

It needs no store. The owner of a shard gathers the contributions chunk by chunk, sums them in rank
order, updates the values and broadcasts them. The arithmetic is the same as that of the exchange
over a store, and the results are equal bit for bit.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from .._arithmetic._layout import Piece, Rule
from .._arithmetic._reduction import mean
from .._arithmetic._sharded import Source, as_sent
from .._arithmetic._sync_job import SyncJob
from .._errors import ConfigurationError, NonFiniteUpdateError, SyncError, SyncTimeoutError
from .._terms._support import Support
from .._timing import Timing
from ._base import Schema
from ._endings import Ending, conclude, failure
from ._in_memory import ExchangeInMemory
from ._pending import Pending, Steps

GROUP_CHUNK_BYTES = 4 * 2**20
"""Default bytes of a chunk: many for the latency of a message, few compared with a model."""


class ProcessGroupExchange(ExchangeInMemory):
    """One replica's connection to the others over a process group; see :class:`._base.Exchange`.

    It needs no store, and keeps nothing from which a run could be restarted. Membership is fixed:
    if a replica dies, the collectives of the others fail after the group's own timeout. With a
    backend for a device (NCCL), chunks pass through the memory of that device. To be used by one
    thread at a time.

    With ``delay``, collectives are called in a thread of their own while the replica trains: give
    the exchange a group that the training loop does not use (``torch.distributed.new_group()``).

    Args:
        group: The process group; the default one if None.
        device: The device that holds messages; by default the one that the group's backend needs.
        timing: Its clock is used. The timeouts are those of the group: limits are refused.
        chunk_bytes: Number of bytes handled at once.

    Raises:
        ConfigurationError: There is no process group, this process is not a member of it,
            ``timing`` holds limits, or ``chunk_bytes`` is not a whole number of at least 1.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        device: torch.device | str | None = None,
        timing: Timing | None = None,
        chunk_bytes: int = GROUP_CHUNK_BYTES,
    ) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise ConfigurationError(
                "there is no process group: call torch.distributed.init_process_group() first"
            )
        chosen = group if group is not None else dist.group.WORLD
        if chosen is None or dist.get_rank(chosen) < 0:
            raise ConfigurationError(
                "this process is not a member of the process group: pass a group that includes its "
                "rank"
            )
        rank, world_size = dist.get_rank(chosen), dist.get_world_size(chosen)
        super().__init__(rank, world_size, timing or Timing(), chunk_bytes)
        self._group = chosen
        self._device = torch.device(device) if device is not None else _device_of(self._group)
        self.support = Support(
            weighs=True,
            delays=True,
            agrees_on_lr=True,
            lanes=True,
            in_background=self._timing.in_background,
            clock=self._timing.clock,
        )
        self._in_collectives = False  # whether the others are in the collectives of the same sync
        self._refused: NonFiniteUpdateError | None = None
        # Held while collectives are called. With a delay, two threads use the exchange, and all
        # replicas need the same order.
        self._turn = threading.RLock()

    def _schemas(self, schema: Schema) -> tuple[Schema, list[Schema]]:
        settings = {"chunk_bytes": str(self._chunk_bytes), **schema.settings}
        compared = (dict(schema.tensors), settings)
        return Schema(*compared), [Schema(*other) for other in self._gather_objects(compared)]

    # A replica that leaves tells all at once
    def begin(self, job: SyncJob, *, last: bool = False) -> Pending:  # noqa: ARG002
        """Do nothing yet: ``finish()`` does the whole sync, since collectives need all replicas."""
        return self._begun(job, partial(self._guarded, job))

    def leave(self) -> None:
        """Tell the others that this replica is done; repeatable."""
        if not self._ended and self._schema is not None:
            self._syncs.check("this replica cannot leave")
            self._ended = True
            self._gather_objects(("", Ending(self.rank, "left", self._progress), None))

    def abort(self, error: BaseException) -> None:
        """Tell the others, at their next sync, that this replica has failed.

        Repeatable; never raises.

        A sync that another thread carries out cannot be interrupted: this waits until it ends, at
        the latest after the process group's timeout.
        """
        with self._turn:
            self._syncs.give_up()
            if not self._ended and self._schema is not None:
                self._ended = True
                with suppress(RuntimeError):  # the others are gone, too
                    self._gather_objects(("", failure(self.rank, self._progress, error), None))

    @contextmanager
    def _guarded(self, job: SyncJob) -> Iterator[None]:
        """End the exchange if a sync fails.

        It cannot be used any more: the others wait in collectives that this replica has left.
        """
        try:
            with self._turn:
                yield
        except BaseException as error:
            if not self._in_collectives:
                self.abort(error)  # the others are waiting to learn what comes next
            self._ended = True
            # Collectives raise a RuntimeError if a peer is gone or the group's timeout has passed.
            if self._in_collectives and isinstance(error, RuntimeError):
                raise _translated(error, self._describe(job)) from error
            raise

    def _sync(self, job: SyncJob) -> Steps:
        yield
        clock, layout = self._timing.clock, job.layout
        start = clock()
        self._in_collectives = False
        self._prepare(job)
        ready = clock()
        self._agree(job)
        waited = clock() - ready
        sent = received = 0
        for shard in range(layout.shards):
            for chunk in layout.chunks(shard, self._chunk_bytes):
                # What all take from rank 0 need not be gathered: it only has to be broadcast.
                from_rank_zero = layout.groups[chunk.group].rule is Rule.FIRST
                owner = 0 if from_rank_zero else shard % self.world_size
                self._reduce(job, chunk, owner)
                size = layout.piece_bytes(chunk)
                gathered = 0 if from_rank_zero else size
                if self.rank == owner:
                    sent += size
                    received += gathered * (self.world_size - 1)
                else:
                    sent += gathered
                    received += size
        self._check_all()
        return self._finished(job, sent=sent, received=received, waited=waited, since=start)

    def _reduce(self, job: SyncJob, chunk: Piece, owner: int) -> None:
        """Gather a chunk at its owner, sum it in rank order, update it, broadcast and adopt it."""
        sources: list[Source] = [
            partial(_moved, part) for part in self._gathered(job, chunk, owner)
        ]
        values = job.destination(chunk)
        if values is None:
            values = self._scratch.tensor(1, job.layout, chunk)
        try:
            if sources:
                clipped, number = self._clipped(sources), self._progress.next
                total = mean(job, chunk, clipped, self._scratch, number, self._shares)
                values = job.update(chunk, total).contiguous()
                job.check_update(chunk, values, number)
        except NonFiniteUpdateError as error:
            # The others are waiting for this chunk; they learn of the error at the end.
            self._refused = self._refused or error
        values = self._broadcast(values, owner)
        job.adopt(chunk, values)

    def _check_all(self) -> None:
        """Raise, on every replica, the error of an owner whose new values were refused."""
        own = self._refused
        refusals = self._gather_objects(own and (own.tensor, own.dtype, own.sync, own.outer_lr))
        for refusal in refusals:
            if refusal is not None:
                raise NonFiniteUpdateError(*refusal)

    def _gathered(self, job: SyncJob, chunk: Piece, owner: int) -> list[torch.Tensor]:
        """All contributions to a chunk, in rank order; empty if this replica is not its owner."""
        from_rank_zero = job.layout.groups[chunk.group].rule is Rule.FIRST
        if from_rank_zero and self.rank:
            return []
        contribution = as_sent(job)(chunk, self._scratch.tensor(0, job.layout, chunk))
        if from_rank_zero:
            return [contribution]
        out = contribution.to(self._device).contiguous()
        parts = (
            [torch.empty_like(out) for _ in range(self.world_size)] if self.rank == owner else None
        )
        messages = None if parts is None else [_bytes(part) for part in parts]
        dist.gather(_bytes(out), messages, dst=self._global(owner), group=self._group)
        return parts or []

    def _broadcast(self, values: torch.Tensor, owner: int) -> torch.Tensor:
        moved = values.to(self._device)  # the values themselves, if they are there
        dist.broadcast(_bytes(moved), self._global(owner), group=self._group)
        return values if self.rank == owner else values.copy_(moved)

    def _agree(self, job: SyncJob) -> None:
        """All replicas say which sync comes next, or how they ended.

        Raises an error unless all want the same sync.
        """
        self._in_collectives = True
        answers = self._gather_objects((job.fingerprint, None, job.contribution))
        endings = {rank: answer[1] for rank, answer in enumerate(answers) if answer[1] is not None}
        error = conclude(endings, endings, self.rank, self._progress)
        if error is not None:
            raise error
        self._settle(job, [answer[0] for answer in answers], [answer[2] for answer in answers])

    def _gather_objects(self, value: Any) -> list[Any]:
        """The values of all replicas, in rank order."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def _global(self, rank: int) -> int:
        return dist.get_global_rank(self._group, rank)


# A source
def _moved(part: torch.Tensor, piece: Piece, out: torch.Tensor) -> torch.Tensor:  # noqa: ARG001
    return part.to(out.device)


def _bytes(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.uint8)  # backends support few dtypes, but all support this one


def _device_of(group: dist.ProcessGroup) -> torch.device:
    backend = dist.get_backend(group)
    return (
        torch.device("cuda", torch.cuda.current_device())
        if "nccl" in backend
        else torch.device("cpu")
    )


def _translated(error: RuntimeError, description: str) -> SyncError:
    first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
    if "timed out" in str(error).lower() or "timeout" in str(error).lower():
        return SyncTimeoutError(
            f"{description} was not completed within the process group's timeout: {first_line}", []
        )
    return SyncError(f"{description} failed in the process group: {first_line}")

"""The exchange over a ``torch.distributed`` process group, for replicas that do share a network. Same arithmetic, no store.

Chunks are gathered by the owner of their shard, summed in rank order, updated, and broadcast: every replica reads the
same bytes, and the result is bit for bit that of the exchange over a store.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from .._arithmetic._layout import Rule
from .._arithmetic._reduction import mean
from .._arithmetic._sent import as_sent
from .._arithmetic._sharded import Scratch, contributions
from .._arithmetic._sync_job import SyncJob
from .._checks import check_whole
from .._errors import (
    ConfigurationError,
    MismatchError,
    NonFiniteUpdateError,
    SyncError,
    SyncTimeoutError,
)
from .._timing import Timing
from ._base import Exchange, Schema
from ._endings import Ending, Progress, conclude, describe, failure
from ._pending import Syncs
from ._report import SyncReport
from ._schemas import compare_schemas

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .._arithmetic._layout import Piece
    from .._arithmetic._sharded import Source
    from ._pending import Pending, Steps

GROUP_CHUNK_BYTES = 4 * 2**20
"""Default size of a chunk in bytes: large enough to hide a message's latency, small beside a model."""


class ProcessGroupExchange(Exchange):
    """One replica's side of an exchange over a process group; see :class:`._base.Exchange`.

    Needs no store, keeps nothing for a restart, and membership is fixed: if a replica dies, the others' collectives fail
    when the group's own timeout has passed. With a backend of a device (NCCL) chunks travel through that device's memory.
    Used from one thread at a time.

    Args:
        group: The process group; the default one if None.
        device: Where messages lie; by default what the group's backend needs.
        timing: Its clock is used; the timeouts are the group's own.
        chunk_bytes: Bytes handled at once.

    Raises:
        ConfigurationError: There is no process group, or ``chunk_bytes`` is not a whole number of at least 1.
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
        check_whole("chunk_bytes", chunk_bytes)
        chosen = group if group is not None else dist.group.WORLD
        if chosen is None or dist.get_rank(chosen) < 0:
            raise ConfigurationError("this process is not a member of the process group")
        self._group = chosen
        self.rank = dist.get_rank(self._group)
        self.world_size = dist.get_world_size(self._group)
        self._device = torch.device(device) if device is not None else _device_of(self._group)
        self._timing = timing or Timing()
        self._chunk_bytes = chunk_bytes
        self._scratch = Scratch(chunk_bytes)
        self._schema: Schema | None = None
        self._progress = Progress()
        self._syncs = Syncs()
        self._talking = False  # with the others, in a sync
        self._refused: NonFiniteUpdateError | None = None
        self._ended = False

    def join(self, schema: Schema) -> None:
        """Compare schemas with all others; see :meth:`._base.Exchange.join`."""
        if self._schema is None:
            settings = {"chunk_bytes": str(self._chunk_bytes), **schema.settings}
            plain = (dict(schema.tensors), settings)
            for rank, other in enumerate(self._everybodys(plain)):
                compare_schemas(f"rank {self.rank}", Schema(*plain), f"rank {rank}", Schema(*other))
            self._schema = schema
        elif schema != self._schema:
            raise ConfigurationError(
                "this exchange has already joined with another model or other settings"
            )

    def begin(self, job: SyncJob, *, last: bool = False) -> Pending:  # noqa: ARG002 - who has left has told all at once
        """Do nothing yet: collectives need all replicas at once. ``finish()`` does the whole sync; ``ready()`` returns True."""
        if self._schema is None or self._ended:
            raise SyncError(
                "this exchange has ended" if self._ended else "join() comes before the first sync"
            )
        return self._syncs.begin(job.name, self._sync(job), partial(self._guarded, job))

    def shards(self, size: int) -> int:  # noqa: ARG002 - the protocol's signature
        """The number of shards: one per replica."""
        return self.world_size

    def leave(self) -> None:
        """Tell the others that this replica is done; repeatable."""
        if not self._ended and self._schema is not None:
            self._syncs.check("this replica cannot leave")
            self._ended = True
            self._everybodys(("", Ending(self.rank, "left", self._progress)))

    def abort(self, error: BaseException) -> None:
        """Tell the others, at their next sync, that this replica has failed; repeatable, never raises."""
        self._syncs.give_up()
        if not self._ended and self._schema is not None:
            self._ended = True
            try:
                self._everybodys(("", failure(self.rank, self._progress, error)))
            except RuntimeError:
                return  # they are gone, too

    @contextmanager
    def _guarded(self, job: SyncJob) -> Iterator[None]:
        """Where a sync fails, so does the exchange: the others wait in collectives that nobody joins any more."""
        try:
            yield
        except BaseException as error:
            if not self._talking:
                self.abort(error)  # the others wait to hear what comes next
            self._ended = True
            # What collectives raise: a peer is gone, or the time is up.
            if self._talking and isinstance(error, RuntimeError):
                raise _translated(error, describe(job.kind, job.name, self._progress)) from error
            raise

    def _sync(self, job: SyncJob) -> Steps:
        yield lambda: True
        clock, layout = self._timing.clock, job.layout
        start = clock()
        self._talking = False
        for shard in range(layout.shards):
            for _ in contributions(job, shard, self.rank, self._chunk_bytes, self._scratch):
                pass  # only to see that all of it is finite, before anybody changes anything
        ready = clock()
        self._agree(job)
        waited = clock() - ready
        sent = received = 0
        for shard in range(layout.shards):
            owner = shard % self.world_size
            for chunk in layout.chunks(shard, self._chunk_bytes):
                size = layout.piece_bytes(chunk)
                self._reduce(job, chunk, owner)
                once = layout.groups[chunk.group].rule is Rule.FIRST
                gathered = int(self.rank == 0) if once else 1
                if self.rank == owner:
                    received += size * (int(owner != 0) if once else self.world_size - 1)
                    sent += size
                else:
                    sent += size * gathered
                    received += size
        self._check_all()
        number, self._progress = self._progress.number, self._progress.plus(job.kind)
        return SyncReport(
            sync=number,
            fragment=job.name,
            committed=True,
            members=self.world_size,
            bytes_sent=sent,
            bytes_received=received,
            wait_seconds=waited,
            exchange_seconds=clock() - start - waited,
        )

    def _reduce(self, job: SyncJob, chunk: Piece, owner: int) -> None:
        """One chunk: gathered by its owner, summed in rank order, updated, broadcast, adopted."""
        layout, first = job.layout, job.layout.groups[chunk.group].rule is Rule.FIRST
        buffer = self._scratch.tensor(0, layout, chunk)
        mine = None if first and self.rank else as_sent(job)(chunk, buffer)
        gathered = [] if first else self._gathered(mine, owner)
        values = self._landing(job, chunk)
        try:
            total = self._first(mine, buffer, owner) if first else self._mean(job, chunk, gathered)
            if total is not None:
                values = job.update(chunk, total).contiguous()
                job.check_update(chunk, values, self._progress.next)
        except NonFiniteUpdateError as error:
            self._refused = (
                self._refused or error
            )  # the others wait for this chunk: they are told at the end
        values = self._broadcast(values, owner)
        job.adopt(chunk, values)

    def _check_all(self) -> None:
        """Raise the error of any owner whose new values were refused, on every replica."""
        refused = torch.tensor(
            [int(self._refused is not None)], dtype=torch.int32, device=self._device
        )
        dist.all_reduce(refused, op=dist.ReduceOp.MAX, group=self._group)
        if refused.item():
            error = self._refused
            refusals = self._everybodys(
                None if error is None else (error.tensor, error.dtype, error.sync, error.outer_lr)
            )
            raise NonFiniteUpdateError(*next(other for other in refusals if other is not None))

    def _landing(self, job: SyncJob, chunk: Piece) -> torch.Tensor:
        destination = job.destination(chunk)
        return self._scratch.tensor(1, job.layout, chunk) if destination is None else destination

    def _gathered(self, mine: torch.Tensor | None, owner: int) -> list[torch.Tensor]:
        """All contributions to a chunk, in rank order; nothing where this replica is not its owner."""
        assert mine is not None  # everybody contributes to what is summed
        out = mine.to(self._device).contiguous()
        parts = (
            [torch.empty_like(out) for _ in range(self.world_size)] if self.rank == owner else None
        )
        messages = None if parts is None else [_bytes(part) for part in parts]
        dist.gather(_bytes(out), messages, dst=self._global(owner), group=self._group)
        return parts or []

    def _mean(self, job: SyncJob, chunk: Piece, parts: list[torch.Tensor]) -> torch.Tensor | None:
        sources: list[Source] = [partial(_moved, part) for part in parts]
        return mean(job, chunk, sources, self._scratch, self._progress.next) if sources else None

    def _first(
        self, mine: torch.Tensor | None, buffer: torch.Tensor, owner: int
    ) -> torch.Tensor | None:
        if owner == 0:
            return mine
        if self.rank == 0 and mine is not None:
            dist.send(
                _bytes(mine.to(self._device).contiguous()), self._global(owner), group=self._group
            )
        if self.rank != owner:
            return None
        values = torch.empty_like(buffer, device=self._device)
        dist.recv(_bytes(values), self._global(0), group=self._group)
        return buffer.copy_(values)

    def _broadcast(self, values: torch.Tensor, owner: int) -> torch.Tensor:
        if values.device == self._device:
            dist.broadcast(_bytes(values), self._global(owner), group=self._group)
            return values
        moved = values.to(self._device)
        dist.broadcast(_bytes(moved), self._global(owner), group=self._group)
        return values if self.rank == owner else values.copy_(moved)

    def _agree(self, job: SyncJob) -> None:
        """Everybody says what comes next, or how it ended; raises unless all want the same sync."""
        self._talking = True
        words = self._everybodys((job.fingerprint, None))
        endings = {rank: ending for rank, (_, ending) in enumerate(words) if ending is not None}
        error = conclude(endings, endings, self.rank, self._progress)
        if error is not None:
            raise error
        for rank, (fingerprint, _) in enumerate(words):
            if fingerprint != job.fingerprint:
                raise MismatchError(
                    f"in {describe(job.kind, job.name, self._progress)}, rank {rank} contributes other tensors than rank "
                    f"{self.rank}: all replicas must sync the same tensors, with the same shapes and dtypes, in the same order"
                )

    def _everybodys(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def _global(self, rank: int) -> int:
        return dist.get_global_rank(self._group, rank)


def _moved(part: torch.Tensor, piece: Piece, out: torch.Tensor) -> torch.Tensor:  # noqa: ARG001 - a source
    return part.to(out.device)


def _bytes(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.uint8)  # backends know few dtypes, and all know this one


def _device_of(group: dist.ProcessGroup) -> torch.device:
    backend = dist.get_backend(group)
    return (
        torch.device("cuda", torch.cuda.current_device())
        if "nccl" in backend
        else torch.device("cpu")
    )


def _translated(error: RuntimeError, what: str) -> SyncError:
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    if "timed out" in str(error).lower() or "timeout" in str(error).lower():
        return SyncTimeoutError(
            f"{what} was not completed within the process group's timeout: {text}", []
        )
    return SyncError(f"{what} failed in the process group: {text}")

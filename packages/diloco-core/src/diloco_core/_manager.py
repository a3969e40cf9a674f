"""The bridge to torchft: its manager's eight members over our exchange, and our loop over its manager."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ._allreduce import Mean
from ._endings import Progress
from ._errors import ConfigurationError
from ._exchange import CHUNK_BYTES, Schema, SyncJob, SyncReport
from ._layout import Rule
from ._rendezvous import check_identity
from ._sharded import Scratch, contributions

if TYPE_CHECKING:
    from collections.abc import Callable

    from ._exchange import Exchange


_MEMBERS = ("start_quorum", "allreduce", "should_commit", "allow_state_dict_read", "disallow_state_dict_read")


class Work(Protocol):
    """What ``allreduce`` returns: something to wait for."""

    def wait(self) -> Any:
        """Return when the tensor has been averaged."""
        ...


class Manager(Protocol):
    """The members of ``torchft.Manager`` that its DiLoCo uses."""

    _use_async_quorum: bool

    def current_step(self) -> int:
        """Committed steps so far."""
        ...

    def start_quorum(self) -> None:
        """Begin a step."""
        ...

    def allreduce(self, tensor: torch.Tensor, should_quantize: bool = False) -> Work:
        """Average a tensor over the replicas, in place."""
        ...

    def should_commit(self) -> bool:
        """Vote on the step; True if it counts."""
        ...

    def allow_state_dict_read(self) -> None:
        """State may be read by a recovering replica."""
        ...

    def disallow_state_dict_read(self) -> None:
        """State is being changed."""
        ...

    def register_state_dict_fn(
        self, key: str, load_state_dict: Callable[[Any], None], state_dict: Callable[[], Any]
    ) -> None:
        """Register state for recovery."""
        ...


class MockManager:
    """Stands where ``torchft.Manager`` stands, on any of our exchanges: torchft's DiLoCo over an object store.

    Membership is strict: every average is over all replicas or raises, so every step commits. Averages are taken at once,
    in the order of the calls, which must be the same on all replicas. Not thread-safe.

    Args:
        exchange: From :func:`connect` or :func:`in_process`.
    """

    _use_async_quorum = False

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.state_dict_fns: dict[str, tuple[Callable[[Any], None], Callable[[], Any]]] = {}
        self._step = 0
        self._last: list[int] = []
        self._readable = True

    def current_step(self) -> int:
        """Committed steps so far."""
        return self._step

    def start_quorum(self) -> None:
        """Meet the other replicas, the first time; later steps need nothing, since membership is strict."""
        self.exchange.join(Schema({}, {"operation": "manager"}))

    def allreduce(self, tensor: torch.Tensor, should_quantize: bool = False) -> CompletedWork:
        """Average a floating-point tensor over all replicas, in place.

        Raises:
            ConfigurationError: ``should_quantize``: the exchange has no codec yet, and full precision was not asked for.
        """
        if should_quantize:
            raise ConfigurationError("should_quantize=True: quantized averages are not there yet; pass False")
        self.start_quorum()
        job = Mean([tensor], self.exchange.world_size, self._last)
        job.begin()
        self._last = [self.exchange.sync(job).sync]
        job.finish()
        return CompletedWork(tensor)

    def should_commit(self) -> bool:
        """Count the step. Always True: an average that failed has raised."""
        self._step += 1
        return True

    def allow_state_dict_read(self) -> None:
        """State may be read."""
        self._readable = True

    def disallow_state_dict_read(self) -> None:
        """State is being changed."""
        self._readable = False

    def register_state_dict_fn(
        self, key: str, load_state_dict: Callable[[Any], None], state_dict: Callable[[], Any]
    ) -> None:
        """Keep the functions in ``state_dict_fns``; strict membership recovers nobody, so they are not called."""
        self.state_dict_fns[key] = (load_state_dict, state_dict)


class CompletedWork:
    """An average that is done."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def wait(self) -> bool:
        """Return at once."""
        return True

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A completed future of the tensor."""
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result([self._tensor])
        return future


class ManagerExchange:
    """Our outer loop over a torchft-shaped manager; see :class:`._exchange.Exchange`.

    Every replica averages everything and takes the whole outer step itself. The manager decides who takes part, gives a
    joiner its initial state and votes on the commit: a sync that it refuses leaves the global copy and the outer state as
    they were, and takes the model back to the global copy.

    Args:
        manager: ``torchft.Manager`` or anything with its members.
        rank: This replica's number, for reports and errors only.
        world_size: The number of replicas, for reports only.

    Raises:
        ConfigurationError: ``manager`` lacks a member, or a number is not allowed.
    """

    def __init__(self, manager: Manager, *, rank: int = 0, world_size: int = 1) -> None:
        missing = [name for name in _MEMBERS if not callable(getattr(manager, name, None))]
        if missing:
            raise ConfigurationError(
                f"{manager!r} is not a manager: it has no {', '.join(missing)}. Pass a torchft.Manager or a MockManager."
            )
        self.rank, self.world_size = check_identity(rank, world_size)
        self._manager = manager
        self._scratch = Scratch(CHUNK_BYTES)
        self._progress = Progress()

    def join(self, schema: Schema) -> None:
        """Nothing to do: the manager meets the others at every quorum."""

    def sync(self, job: SyncJob, *, last: bool = False) -> SyncReport:  # noqa: ARG002 - the manager knows who is there
        """Average, vote, update; see :meth:`._exchange.Exchange.sync`."""
        start = time.monotonic()
        committed, members = True, self.world_size
        if job.kind != "initial":  # the manager gives a joiner its initial state at its first quorum
            committed = self._average_and_apply(job)
        number = self._progress.number
        self._progress = self._progress.plus(job.kind)
        return SyncReport(
            sync=number,
            fragment=job.name,
            committed=committed,
            members=members,
            bytes_sent=0,
            bytes_received=0,
            wait_seconds=0.0,
            exchange_seconds=time.monotonic() - start,
        )

    def shards(self, size: int) -> int:  # noqa: ARG002 - the protocol's signature
        """One: every replica updates everything."""
        return 1

    def leave(self) -> None:
        """Nothing to do: the manager belongs to the caller."""

    def abort(self, error: BaseException) -> None:
        """Nothing to do: the manager belongs to the caller."""

    def _average_and_apply(self, job: SyncJob) -> bool:
        layout = job.layout
        if any(group.rule is Rule.FIRST for group in layout.groups):
            raise ConfigurationError(
                "a torchft manager can only average, and integer buffers are taken from rank 0: pass buffers='none'"
            )
        sums = [torch.empty(group.numel, dtype=group.dtype, device="cpu") for group in layout.groups]
        for shard in range(layout.shards):
            chunks = layout.chunks(shard, CHUNK_BYTES)
            values = contributions(job, shard, self.rank, CHUNK_BYTES, self._scratch)
            for chunk, value in zip(chunks, values, strict=True):
                sums[chunk.group][chunk.start : chunk.stop].copy_(value)
        self._manager.start_quorum()
        self._manager.disallow_state_dict_read()
        try:
            for work in [self._manager.allreduce(total) for total in sums]:
                work.wait()
            committed = self._manager.should_commit()
            for shard in range(layout.shards):
                for chunk in layout.chunks(shard, CHUNK_BYTES):
                    if committed:
                        new = job.update(chunk, sums[chunk.group][chunk.start : chunk.stop])
                        job.check_update(chunk, new, self._progress.next)
                        job.adopt(chunk, new)
                    elif (values_before := job.destination(chunk)) is not None:
                        job.adopt(chunk, values_before)
        finally:
            self._manager.allow_state_dict_read()
        return committed

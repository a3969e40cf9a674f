"""The bridge to torchft: its manager's eight members over our exchange; :mod:`._exchange` goes the other way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

from .._allreduce import Mean
from .._errors import ConfigurationError
from .._exchange._base import Schema

if TYPE_CHECKING:
    from collections.abc import Callable

    from .._arithmetic._sync_job import SyncJob
    from .._exchange._base import Exchange
    from .._exchange._report import SyncReport


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
        self._schema = Schema({}, {"operation": "manager"})
        self.state_dict_fns: dict[str, tuple[Callable[[Any], None], Callable[[], Any]]] = {}
        self._step = 0
        self._last: list[int] = []
        self._readable = True

    def current_step(self) -> int:
        """Committed steps so far."""
        return self._step

    def start_quorum(self) -> None:
        """Meet the other replicas, the first time; later steps need nothing, since membership is strict."""
        self.exchange.join(self._schema)

    def meet(self, schema: Schema) -> None:
        """Meet the other replicas now, and compare what all must have in common, which torchft's managers cannot.

        Raises:
            MismatchError: The replicas disagree; it says on what.
        """
        self._schema = Schema(
            schema.tensors, schema.settings
        )  # the store gets no states, so nothing can be exported
        self.start_quorum()

    def share(self, job: SyncJob) -> SyncReport:
        """Sync something else than an average: the initial values, which all take from rank 0."""
        report = self.exchange.begin(job).finish()
        self._last.append(report.sync)  # the next average removes what was published
        return report

    def allreduce(self, tensor: torch.Tensor, should_quantize: bool = False) -> CompletedWork:
        """Average a floating-point tensor over all replicas, in place.

        Raises:
            ConfigurationError: ``should_quantize``: the exchange has no codec yet, and full precision was not asked for.
        """
        if should_quantize:
            raise ConfigurationError(
                "should_quantize=True: quantized averages are not there yet; pass False"
            )
        self.start_quorum()
        job = Mean([tensor], self.exchange.world_size, self._last)
        job.begin()
        self._last = [self.exchange.begin(job).finish().sync]
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

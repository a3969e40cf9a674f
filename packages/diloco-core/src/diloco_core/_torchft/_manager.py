"""The bridge to torchft: the eight members of its manager over our exchange.

:mod:`._exchange` is the other direction.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from .._allreduce import Mean
from .._errors import ConfigurationError
from .._exchange._base import Exchange, Schema


class Manager(Protocol):
    """The members of ``torchft.Manager`` that its DiLoCo uses."""

    _use_async_quorum: bool

    def current_step(self) -> int:
        """Committed steps so far."""

    def start_quorum(self) -> None:
        """Begin a step."""

    def allreduce(self, tensor: torch.Tensor, should_quantize: bool = False) -> Any:
        """Average a tensor over the replicas, in place.

        The result has a ``wait()`` that waits until this is done.
        """

    def should_commit(self) -> bool:
        """Vote on the step; True if it counts."""

    def allow_state_dict_read(self) -> None:
        """From now on, a recovering replica may read the state."""

    def disallow_state_dict_read(self) -> None:
        """From now on, the state must not be read, since it is being changed."""

    def register_state_dict_fn(
        self, key: str, load_state_dict: Callable[[Any], None], state_dict: Callable[[], Any]
    ) -> None:
        """Register state for recovery."""


class MockManager:
    """A stand-in for a ``torchft.Manager`` over any of our exchanges.

    With it, torchft's DiLoCo runs over an object store.

    Membership is fixed: each average is over all replicas or raises an error, so every step
    commits. Averages are computed at once, in the order of the calls, which must be the same on all
    replicas. Not thread-safe.

    Args:
        exchange: From :func:`connect` or :func:`in_process`.
    """

    _use_async_quorum = False

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self._schema = Schema({}, {"operation": "manager"})
        self.state_dict_fns: dict[str, tuple[Callable[[Any], None], Callable[[], Any]]] = {}
        self._step = 0

    def current_step(self) -> int:
        """Committed steps so far."""
        return self._step

    def start_quorum(self) -> None:
        """Meet the other replicas at the first call.

        Later calls do nothing, since membership is fixed.
        """
        self.exchange.join(self._schema)

    def meet(self, schema: Schema) -> None:
        """Meet the other replicas now, and compare what all must have in common.

        torchft's own managers cannot do this.

        Raises:
            MismatchError: The replicas disagree; the error says on what.
        """
        # Without descriptions of fragments, since no states are published that could be exported.
        self._schema = Schema(schema.tensors, {**self._schema.settings, **schema.settings})
        self.start_quorum()

    def allreduce(self, tensor: torch.Tensor, should_quantize: bool = False) -> CompletedWork:
        """Average a floating-point tensor over all replicas, in place.

        Raises:
            ConfigurationError: ``should_quantize`` is True. The manager's averages have no codec,
                and full precision would not be what was asked for.
        """
        if should_quantize:
            raise ConfigurationError(
                "should_quantize=True is not supported, since this manager averages in full "
                "precision: pass False"
            )
        self.start_quorum()
        job = Mean([tensor], self.exchange.world_size)
        job.begin()
        self.exchange.sync(job)
        job.finish()
        return CompletedWork(tensor)

    def should_commit(self) -> bool:
        """Count the step. Returns True always, since an average that fails raises an error."""
        self._step += 1
        return True

    def allow_state_dict_read(self) -> None:
        """Do nothing: with fixed membership no replica recovers."""

    def disallow_state_dict_read(self) -> None:
        """Do nothing: with fixed membership no replica recovers."""

    def register_state_dict_fn(
        self, key: str, load_state_dict: Callable[[Any], None], state_dict: Callable[[], Any]
    ) -> None:
        """Keep the functions in ``state_dict_fns``.

        They are never called: with fixed membership no replica recovers.
        """
        self.state_dict_fns[key] = (load_state_dict, state_dict)


class CompletedWork:
    """An average that is complete."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def wait(self) -> bool:
        """Return at once."""
        return True

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A completed future with the tensor in a list."""
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result([self._tensor])
        return future

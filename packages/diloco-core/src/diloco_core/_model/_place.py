"""The outer loops in use in this process.

At most one of them may sync a tensor, and at most one may use an exchange.

Two loops around one model, each with an optimizer of its own, would take outer steps from each
other's results, and no replica would end with what its run has committed.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from .._errors import ConfigurationError
from ._memory import address, first_overlap

_lock = threading.RLock()
_under_way: weakref.WeakSet[Place] = weakref.WeakSet()


@dataclass(eq=False)
class Place:
    """The place of one outer loop among those in use. Thread-safe.

    Args:
        synced: Returns the tensors that the loop syncs, by name.
        held: Returns all tensors of its model by name, including the synced ones.
        exchange: The exchange over which it syncs.
    """

    synced: Callable[[], Mapping[str, torch.Tensor]]
    held: Callable[[], Mapping[str, torch.Tensor]]
    exchange: object

    def check(self) -> None:
        """Check whether the loop may be entered.

        Raises:
            ConfigurationError: Another loop in use syncs a tensor of this one, or holds a tensor
                that this one syncs (the message names it); or the exchange is in use by another
                loop.
        """
        with _lock:
            for other in _under_way:
                if other is not self and other.exchange is self.exchange:
                    # Syncs are only numbered: two models of the same shape would be confused.
                    raise ConfigurationError(
                        "this exchange is in use by another outer loop, and an exchange serves "
                        "only one at a time: connect to another prefix for this loop. (For the "
                        "same URI and rank, connect() returns the same exchange.)"
                    )
                _compare(self.synced(), other.held())
                _compare(self.held(), other.synced())

    def take(self) -> None:
        """Note that the loop is entered. Raises as :meth:`check` does."""
        with _lock:
            self.check()
            _under_way.add(self)

    def leave(self) -> None:
        """Note that the loop is over; repeatable."""
        with _lock:
            _under_way.discard(self)


def _compare(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> None:
    """Refuse tensors of two loops that overlap."""
    names = {id(tensor): name for name, tensor in reversed([*ours.items()]) if address(tensor)}
    our_tensors = {id(tensor): tensor for tensor in ours.values() if id(tensor) in names}
    # Tensors of one loop do not overlap, and tensors in different storages cannot.
    storages = {_storage(tensor) for tensor in our_tensors.values()}
    candidates = {
        id(tensor): tensor
        for tensor in theirs.values()
        if address(tensor) and _storage(tensor) in storages
    }
    shared = [
        tensor for tensor in our_tensors.values() if id(tensor) in candidates and tensor.numel()
    ]
    overlap = shared or (
        first_overlap([*our_tensors.values(), *candidates.values()]) if candidates else None
    )
    if overlap:
        name = next(names[id(tensor)] for tensor in overlap if id(tensor) in names)
        raise ConfigurationError(
            f"another outer loop in use also holds {name!r}, and at least one of the two syncs it: "
            "they would change each other's results. Use one loop for the model, with all of its "
            "optimizers (DiLoCo(model, [a, b], ...)), or leave the block of the other loop first."
        )


def _storage(tensor: torch.Tensor) -> tuple[str, int]:
    return str(tensor.device), tensor.untyped_storage().data_ptr()

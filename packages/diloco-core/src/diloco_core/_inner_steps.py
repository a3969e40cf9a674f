"""The steps of the inner optimizers, seen through hooks."""

from __future__ import annotations

import threading
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ._errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.utils.hooks import RemovableHandle

_lock = threading.Lock()
_watched: weakref.WeakKeyDictionary[torch.optim.Optimizer, InnerSteps] = weakref.WeakKeyDictionary()


def optimizers_of(given: object) -> list[torch.optim.Optimizer]:
    """The inner optimizers as a list, whether one was given or several.

    Raises:
        ConfigurationError: There is none, one of them is something else, or one comes twice.
    """
    optimizers: list[torch.optim.Optimizer] = []
    for optimizer in given if isinstance(given, (list, tuple)) else [given]:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigurationError(
                f"inner_optimizer must be a torch.optim.Optimizer, or several of them, not {optimizer!r}"
            )
        if any(optimizer is other for other in optimizers):
            raise ConfigurationError("inner_optimizer names the same optimizer twice")
        optimizers.append(optimizer)
    if not optimizers:
        raise ConfigurationError("inner_optimizer is empty: pass the optimizer that the training loop steps")
    return optimizers


class InnerSteps:
    """Calls a function before, and another one after every step of some optimizers. Not thread-safe.

    An optimizer is watched by one outer loop at a time: a loop that was made and never entered gives way to the next.

    Args:
        optimizers: Which to watch.
        before: Called with the optimizer's number before each of its steps.
        after: The same, after each of its steps.

    Attributes:
        in_use: Whether the outer loop has been entered, so that no other one may take the optimizers over.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        before: Callable[[int], None],
        after: Callable[[int], None],
    ) -> None:
        self.in_use = False
        self._optimizers = tuple(optimizers)
        self._before = before
        self._after = after
        self._handles: list[RemovableHandle] = []

    def watch(self) -> None:
        """Begin; repeatable.

        Raises:
            ConfigurationError: Another outer loop is under way with one of the optimizers.
        """
        with _lock:
            others = {id(o): o for o in map(_watched.get, self._optimizers) if o is not None and o is not self}
            if any(other.in_use for other in others.values()):
                raise ConfigurationError(
                    "another outer loop is under way with this inner optimizer: leave its block before the next one is made"
                )
            for other in others.values():
                other.stop()
            for number, optimizer in enumerate(self._optimizers if not self._handles else ()):
                _watched[optimizer] = self
                self._handles += [
                    optimizer.register_step_pre_hook(partial(_call, self._before, number)),
                    optimizer.register_step_post_hook(partial(_call, self._after, number)),
                ]

    def stop(self) -> None:
        """End; repeatable."""
        self.in_use = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _call(function: Callable[[int], None], number: int, *_: Any) -> None:
    function(number)

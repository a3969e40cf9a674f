"""Noticing values that are loaded into the model while it is trained.

They would be synced as if they had been learned.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from .._errors import ModelChangedError
from ._partition import NamedTensor
from ._values import sample

_MOST_VALUES = 64  # of each parameter
_MOST_COUNTERS = 3


class Loads:
    """The detector of loaded values, which compares a few values of every synced parameter.

    Those before the first load since a step are compared with those at the next step.

    Nothing is read where nothing was loaded. Values that the training loop itself changes between
    steps (by clamping them, say) are its own concern, and what replaces a parameter is noticed
    elsewhere. Not thread-safe.

    Args:
        model: The model.
        tensors: The synced parameters.
    """

    def __init__(self, model: torch.nn.Module, tensors: Sequence[NamedTensor]) -> None:
        self._model = model
        self._tensors = tuple(tensors)
        self._counted = [named.tensor for named in self._tensors[:_MOST_COUNTERS]]
        self._versions: list[int] = []
        self._before: list[torch.Tensor] | None = None
        self._hooks = ExitStack()

    def watch(self) -> None:
        """Begin to watch."""
        self.stepped()
        for module in self._model.modules():
            if not isinstance(module, torch.jit.ScriptModule):
                register = module.register_load_state_dict_pre_hook
                handle = register(_Hook(self))  # type: ignore[no-untyped-call]
                self._hooks.callback(handle.remove)

    def stop(self) -> None:
        """Stop watching; repeatable."""
        self._before = None
        self._hooks.close()

    def stepped(self) -> None:
        """Note that the model holds what the training, or a sync, has given it."""
        # The version of a tensor is public only in C++.
        self._versions = [tensor._version for tensor in self._counted]  # noqa: SLF001

    def pause(self) -> None:
        """Take no note of loads until :meth:`stepped` is called."""
        self._versions = []  # those of a DTensor do not tell that its part was written

    def known(self) -> bool:
        """Say whether nothing has changed the model since :meth:`stepped`."""
        return self._versions == [tensor._version for tensor in self._counted]  # noqa: SLF001

    def begins(self) -> None:
        """Note that something is loaded now."""
        # If the loop has already changed the model by other means, a load may be what undoes that.
        if self._before is None and self.known():
            self._before = [_values(named.tensor) for named in self._tensors]

    def check(self, settled: Collection[str] = ()) -> None:
        """Refuse to go on with other values than before the load.

        Args:
            settled: Names of parameters that may hold others, since their committed values will be
                restored.

        Raises:
            ModelChangedError: The values were not put back; the error names the first parameter.
        """
        if self._before is None:
            return
        before, self._before = self._before, None
        for named, values in zip(self._tensors, before, strict=True):
            if named.name in settled:
                continue
            if not torch.equal(_values(named.tensor), values):
                raise ModelChangedError(
                    "values were loaded into the model inside the block, and parameter "
                    f"{named.name!r} still holds them. They would be sent as what this replica "
                    "has learned. Load before the block begins, or let the store decide: "
                    "connect() with resume=True continues from the state of the run (elastic runs "
                    "always do), and only what it does not hold is left to load. To evaluate with "
                    "other weights, put the old values back before the next step.",
                    named.name,
                )


class _Hook:
    """Calls :meth:`Loads.begins`.

    A copy of the model, or a file that it is saved to, does not get it.
    """

    def __init__(self, owner: Loads) -> None:
        self._begins = weakref.WeakMethod(owner.begins)

    def __call__(self, *_: Any) -> None:
        begins = self._begins()
        if begins is not None:
            begins()

    def __reduce__(self) -> tuple[type[partial[object]], tuple[Callable[..., object]]]:
        return partial, (itertools.chain,)  # takes any arguments, and does nothing with them


def _values(tensor: torch.Tensor) -> torch.Tensor:
    """Some values of a tensor as bytes: NaN equals NaN."""
    return sample(tensor, _MOST_VALUES).clone().view(torch.uint8)

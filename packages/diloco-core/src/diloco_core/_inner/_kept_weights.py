"""Noticing an inner optimizer that keeps weights of its own and writes them back.

The result of a sync would be lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from .._errors import ModelChangedError
from .._model._values import part_here, sample

_MOST_PARAMETERS = 8
_MOST_VALUES = 64
# The part of a sync's change that has to be undone at the next step, before the optimizer is said
# to have written a copy back. A copy undoes all of it; a step from the new values undoes only as
# much as one inner step can change.
_BROUGHT_BACK = 0.5


@dataclass(eq=False)
class KeptWeights:
    """Compares a few values of a few parameters at every sync, and after the next step.

    Not thread-safe.

    An optimizer that keeps the weights in a wider dtype than the model's (fp32 master weights of a
    bf16 model) has a tensor in its state that equals the parameter, except for the rounding to the
    parameter's dtype. A sync writes only to the parameter. If the tensor in the state equals the
    parameter again after the next step, and the parameter is back at the values to which this
    replica had trained it, the optimizer has undone the sync.

    Copies in the model's own dtype are ignored, since values do not tell whether the optimizer has
    written the copy to the parameter, or the parameter to the copy; see :mod:`._own_weights`.

    Args:
        optimizers: The inner optimizers.
        names: The name of each parameter, by its ``id()``.
    """

    optimizers: Sequence[torch.optim.Optimizer]
    names: Mapping[int, str]

    def __post_init__(self) -> None:
        self._copies: list[_Copy] = []

    def before_sync(self) -> None:
        """Note which tensors of the optimizers' states are equal to the parameters now."""
        self._copies = [
            copy
            for number, optimizer in enumerate(self.optimizers)
            for parameter in _largest(optimizer)
            for copy in _copies(number, optimizer, parameter)
        ]

    def after_sync(self) -> None:
        """Note what the sync has changed."""
        for copy in self._copies:
            copy.adopted = _values(copy.parameter)

    def check(self, number: int) -> None:
        """Check what an optimizer has done in the first step after a sync.

        Args:
            number: The number of the optimizer that has stepped.

        Raises:
            ModelChangedError: The optimizer has written its own weights back.
        """
        if not self._copies:
            return
        copies = [copy for copy in self._copies if copy.number == number]
        self._copies = [copy for copy in self._copies if copy.number != number]
        for copy in copies:
            if copy.was_written_back():
                optimizer = type(self.optimizers[number]).__name__
                name = self.names.get(id(copy.parameter), "?")
                raise ModelChangedError(
                    f"inner optimizer {number} ({optimizer}) has undone the last sync: it keeps a "
                    f"copy of the weights ({copy.name!r} in its state of parameter {name!r}) and "
                    "has written that back over the values that all replicas had agreed on. Use "
                    "an optimizer that changes the model's own weights. For mixed precision, keep "
                    "the model in fp32 and compute under torch.autocast, instead of keeping fp32 "
                    "weights in the optimizer.",
                    name,
                )


@dataclass(slots=True)
class _Copy:
    number: int
    parameter: torch.Tensor
    name: str
    state: Mapping[str, object]
    trained: torch.Tensor  # what this replica had trained the parameter to
    adopted: torch.Tensor | None = None

    def was_written_back(self) -> bool:
        kept = self.state.get(self.name)
        if self.adopted is None or not isinstance(kept, torch.Tensor):
            return False
        values, difference = _values(self.parameter), self.trained - self.adopted
        if not _is_rounded(kept, self.parameter):
            return False
        brought_back = torch.dot(values - self.adopted, difference)
        return bool(brought_back > _BROUGHT_BACK * torch.dot(difference, difference))


def _largest(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The parameters to compare: those with the most values, which show the most."""
    parameters = [
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad and _is_plain(parameter)
    ]
    return sorted(parameters, key=torch.Tensor.numel, reverse=True)[:_MOST_PARAMETERS]


def _copies(number: int, optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> list[_Copy]:
    state = optimizer.state.get(parameter)
    if not isinstance(state, dict):
        return []
    # Most optimizers keep nothing in another dtype that is as wide. Then no values are read: on an
    # accelerator, that would wait for all that it has still to do.
    others = {
        name: tensor
        for name, tensor in state.items()
        if isinstance(tensor, torch.Tensor)
        and tensor.shape == parameter.shape
        and tensor.dtype is not parameter.dtype
        and tensor.itemsize >= parameter.itemsize
    }
    names = [name for name, tensor in others.items() if _is_rounded(tensor, parameter)]
    trained = _values(parameter) if names else parameter
    return [_Copy(number, parameter, name, state, trained) for name in names]


def _is_rounded(kept: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Say whether a parameter holds the values of a wider tensor, rounded to its own dtype."""
    if not (_is_plain(kept) and _is_plain(parameter)):
        return False
    # A copy in the model's own dtype, or in a narrower one, is exact: nothing is rounded.
    values = _values(parameter)
    return torch.equal(_values(kept, parameter.dtype), values) and not torch.equal(
        _values(kept), values
    )


def _is_plain(tensor: torch.Tensor) -> bool:
    """Say whether values can be taken out of a tensor.

    Quantized states are often subclasses, which support only a few operations.
    """
    tensor = part_here(tensor)
    return (
        type(tensor) in {torch.Tensor, torch.nn.Parameter}
        and tensor.is_floating_point()
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
    )


def _values(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return some values of a contiguous tensor, evenly spread, in float64 on the CPU.

    They are rounded to ``dtype`` first, if it is given.
    """
    values = sample(part_here(tensor), _MOST_VALUES)
    return values.to(dtype or tensor.dtype).to("cpu", torch.float64)

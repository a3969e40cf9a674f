"""The outer optimizer: any element-wise torch optimizer, applied chunk by chunk to the shards a replica owns."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ._errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import TypeAlias

    from ._layout import Piece

    OuterOptimizerFactory: TypeAlias = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]

# Each element's update depends on that element alone, so that shards can be updated apart.
_ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
)


def sgd(lr: float, momentum: float, nesterov: bool) -> OuterOptimizerFactory:
    """A factory of ``torch.optim.SGD``, in its fused form (one pass over the memory).

    Raises:
        ConfigurationError: A value is out of range.
    """
    if not lr > 0:
        raise ConfigurationError(f"the outer learning rate must be positive, not {lr}; usual are 0.4 to 1.0")
    if not 0 <= momentum < 1:
        raise ConfigurationError(f"the outer momentum must be in [0, 1), not {momentum}; usual is 0.9")
    return partial(torch.optim.SGD, lr=lr, momentum=momentum, nesterov=nesterov and momentum > 0, fused=True)


class OuterOptimizer:
    """One torch optimizer whose parameters are chunks of flat shards, stepped one chunk at a time.

    Torch keeps its state per parameter, so handing it one chunk at a time leaves the arithmetic as it is, while the chunk
    is still in the processor's cache. Not thread-safe.

    Args:
        factory: Makes the optimizer from a list of parameters.

    Raises:
        ConfigurationError: The optimizer is not known to be element-wise, or its learning rate is not positive.
    """

    def __init__(self, factory: OuterOptimizerFactory) -> None:
        probe = torch.nn.Parameter(torch.zeros(1))
        self._optimizer = factory([probe])
        name = type(self._optimizer).__name__
        if not isinstance(self._optimizer, _ELEMENTWISE):
            known = ", ".join(kind.__name__ for kind in _ELEMENTWISE)
            raise ConfigurationError(
                f"the outer optimizer {name} is not known to be element-wise, and replicas update shards apart. "
                f"Use one of {known} or a subclass."
            )
        if len(self._optimizer.param_groups) != 1:
            raise ConfigurationError("the outer optimizer must have one parameter group")
        lr = float(self._optimizer.param_groups[0]["lr"])
        if not lr > 0:
            raise ConfigurationError(f"the outer learning rate must be positive, not {lr}")
        self._optimizer.param_groups[0]["params"] = []
        self._chunks: dict[Piece, torch.nn.Parameter] = {}
        self._loaded: dict[str, Any] = {}

    @property
    def settings(self) -> dict[str, str]:
        """Class and hyperparameters, as text: what replicas must have in common."""
        group = self._optimizer.param_groups[0]
        values = {key: str(value) for key, value in sorted(group.items()) if key != "params"}
        return {"outer_optimizer": type(self._optimizer).__name__, **{f"outer_{key}": v for key, v in values.items()}}

    @property
    def lr(self) -> float:
        """The learning rate."""
        return float(self._optimizer.param_groups[0]["lr"])

    def not_finite(self, piece: Piece) -> int | None:
        """Index of an element of a chunk whose state is NaN or infinite; None where there is none.

        Plain SGD is not looked at: what overflows in its momentum shows in the values too.
        """
        if isinstance(self._optimizer, torch.optim.SGD):
            return None
        for values in self.tensors(piece).values():
            if not math.isfinite(values.sum().item()) and not bool((finite := values.isfinite()).all()):
                return int(finite.logical_not().nonzero()[0].item())
        return None

    def step(self, piece: Piece, values: torch.Tensor, gradient: torch.Tensor) -> None:
        """Update ``values`` (a flat view that stays the same from step to step) in place."""
        parameter = self._chunks.get(piece)
        if parameter is None:
            parameter = self._chunks[piece] = torch.nn.Parameter(values)
            self._restore(piece, parameter)
        parameter.grad = gradient
        self._optimizer.param_groups[0]["params"] = [parameter]
        self._optimizer.step()
        self._optimizer.param_groups[0]["params"] = []
        parameter.grad = None

    def tensors(self, piece: Piece) -> dict[str, torch.Tensor]:
        """State that belongs to the elements of a chunk: flat tensors of its size. Empty before its first step."""
        return {name: value for name, value in self._state(piece).items() if _is_elementwise(value)}

    def scalars(self, piece: Piece) -> dict[str, float]:
        """State of a chunk that is one number, such as a step count. Empty before its first step."""
        state = self._state(piece)
        return {name: float(v) for name, v in state.items() if v is not None and not _is_elementwise(v)}

    def install(
        self, piece: Piece, values: torch.Tensor, tensors: Mapping[str, torch.Tensor], scalars: Mapping[str, float]
    ) -> None:
        """Replace the state of a chunk; ``values`` is the flat view that is stepped, ``tensors`` are taken over."""
        self.forget([piece])
        parameter = self._chunks[piece] = torch.nn.Parameter(values)
        if tensors or scalars:
            numbers = {name: torch.tensor(value, dtype=torch.float32) for name, value in scalars.items()}
            self._optimizer.state[parameter] = {**numbers, **tensors}

    def forget(self, pieces: Iterable[Piece]) -> None:
        """Let go of the state of some chunks."""
        for piece in pieces:
            parameter = self._chunks.pop(piece, None)
            if parameter is not None:
                self._optimizer.state.pop(parameter, None)

    def state_dict(self) -> dict[str, Any]:
        """All of its state: the ranges it covers (group, start, stop), their tensors, and the scalars."""
        ranges = [
            {"range": [piece.group, piece.start, piece.stop], "tensors": self.tensors(piece)} for piece in self._chunks
        ]
        return {
            "ranges": ranges or self._loaded.get("ranges", []),
            "scalars": next(map(self.scalars, self._chunks), {}) or self._loaded.get("scalars", {}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Use this state from the next steps on, whatever the size of their chunks."""
        self._loaded = dict(state)
        self._chunks.clear()
        self._optimizer.state.clear()

    def _restore(self, piece: Piece, parameter: torch.nn.Parameter) -> None:
        if not self._loaded.get("ranges"):
            return
        state: dict[str, Any] = {
            name: torch.tensor(v, dtype=torch.float32) for name, v in self._loaded["scalars"].items()
        }
        done = 0
        for entry in self._loaded["ranges"]:
            group, first, last = entry["range"]
            start, stop = max(first, piece.start), min(last, piece.stop)
            if group == piece.group and start < stop:
                done += stop - start
                for name, values in entry["tensors"].items():
                    target = state.setdefault(name, torch.empty_like(parameter, requires_grad=False))
                    target[start - piece.start : stop - piece.start] = values[start - first : stop - first]
        if done != piece.numel:
            raise ConfigurationError(
                "the loaded state holds the outer optimizer's state for other shards: load the state that was saved by "
                "the same rank of a run with the same world size"
            )
        self._optimizer.state[parameter] = state

    def _state(self, piece: Piece) -> Mapping[str, Any]:
        return self._optimizer.state[self._chunks[piece]] if piece in self._chunks else {}


def _is_elementwise(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 1

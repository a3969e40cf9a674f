"""Whether an optimizer can take the outer steps: it is tried out on a small tensor, whole and cut into pieces.

Replicas update shards apart, chunk by chunk, and a shard may pass from one replica to another. So the update of an element
must depend on that element alone, and the optimizer's state must be one that can be published: tensors that belong to the
elements, and numbers that are the same for all of them.
"""

from __future__ import annotations

import copy
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from .._arithmetic._layout import Piece
from .._checks import kind_of
from .._errors import ConfigurationError
from ._optimizer import OuterOptimizer, make

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ._optimizer import OuterOptimizerFactory

_NUMEL = 97
# Where the tensor is cut. Shards and chunks begin at multiples of 16, so that vectorised kernels round alike in all of them.
_CUTS, _OTHER_CUTS = (0, 16, 64, _NUMEL), (0, 48, _NUMEL)
# How large the gradients of each step are: limits on norms are of no effect on small ones, and are seen on large ones.
_SCALES = (1.0, 1e-3, 1e3, 0.0, 1e6, 1.0)
_SAVED_AFTER = 3
_SEED = 20231114


def try_out(factory: OuterOptimizerFactory) -> None:
    """Refuse an optimizer that cannot take the outer steps of shards.

    The random numbers of the caller's own training are left as they are.

    Args:
        factory: Makes the optimizer from a list of parameters.

    Raises:
        ConfigurationError: It cannot be made or cannot step, is not element-wise, or keeps a state that cannot be published.
    """
    # Also where torch's default device is another one: a replica takes the outer steps on the CPU.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        chance = torch.Generator("cpu").manual_seed(_SEED)
        start = torch.randn(_NUMEL, generator=chance, dtype=torch.float32)
        gradients = [
            torch.randn(_NUMEL, generator=chance, dtype=torch.float32) * scale for scale in _SCALES
        ]
        whole = _walk_whole(factory, start, gradients)
        values = start.clone()
        outer = OuterOptimizer(factory)
        _walk(outer, _CUTS, values, gradients[:_SAVED_AFTER], whole[:_SAVED_AFTER])
        pieces = _pieces(_CUTS)
        _check_state(outer, pieces)
        # A piece that another replica goes on with, and a checkpoint that is loaded, perhaps with chunks of another size.
        moved, loaded = OuterOptimizer(factory), OuterOptimizer(factory)
        for_moved, for_loaded = values.clone(), values.clone()
        for piece in pieces:
            state = {name: tensor.clone() for name, tensor in outer.tensors(piece).items()}
            moved.install(piece, for_moved[piece.start : piece.stop], state, outer.scalars(piece))
        loaded.load_state_dict(copy.deepcopy(outer.state_dict()))
        rest, wanted = gradients[_SAVED_AFTER:], whole[_SAVED_AFTER:]
        _walk(outer, _CUTS, values, rest, wanted)
        _walk(loaded, _OTHER_CUTS, for_loaded, rest, wanted, "after its state was saved and loaded")
        _walk(moved, _CUTS, for_moved, rest, wanted, "after its state was saved and loaded")


def _walk_whole(
    factory: OuterOptimizerFactory, start: torch.Tensor, gradients: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """What the values are after every step, where the optimizer has all of them in one tensor."""
    parameter = torch.nn.Parameter(start.clone())
    optimizer = make(factory, [parameter])
    values_by_step = []
    for gradient in gradients:
        parameter.grad = gradient.clone()
        with _named(type(optimizer).__name__):
            optimizer.step()
        values_by_step.append(parameter.detach().clone())
    return values_by_step


def _walk(
    outer: OuterOptimizer,
    cuts: Sequence[int],
    values: torch.Tensor,
    gradients: Sequence[torch.Tensor],
    wanted: Sequence[torch.Tensor],
    when: str = "",
) -> None:
    """The same steps piece by piece, compared with those of the whole tensor."""
    for gradient, there in zip(gradients, wanted, strict=True):
        for piece in _pieces(cuts):
            part = slice(piece.start, piece.stop)
            with _named(outer.name):
                outer.step(piece, values[part], gradient[part].clone())
        if not torch.allclose(values, there, rtol=1e-5, atol=1e-7, equal_nan=True):
            problem = (
                f"gives other values {when}: something that its steps depend on is not in its state"
                if when
                else "is not element-wise: it gives other values for a tensor that is cut into pieces than for the whole tensor"
            )
            raise ConfigurationError(
                f"the outer optimizer {outer.name} {problem}. Replicas update shards apart, so the update of an element must "
                "depend on nothing but that element's gradients and state (no norms, no trust ratios, no clipping)."
            )


def _check_state(outer: OuterOptimizer, pieces: Sequence[Piece]) -> None:
    for piece in pieces:
        for name, value in outer.state(piece).items():
            if isinstance(value, torch.Tensor) and value.dim():
                fits = value.shape == (piece.numel,) and value.dtype is torch.float32
                what = f"a tensor of shape {list(value.shape)} and {value.dtype}"
            else:
                fits = value is None or _is_number(value)
                what = f"{kind_of(value)}"
            if not isinstance(name, str) or not fits:
                raise ConfigurationError(
                    f"the outer optimizer {outer.name} keeps {name!r}, {what}, as the state of {piece.numel} float32 "
                    "values. Only numbers, and tensors with the shape and dtype of the values, can be published."
                )


def _is_number(value: object) -> bool:
    try:
        float(value)  # type: ignore[arg-type] # it is the question whether this works
    except (TypeError, ValueError):
        return False
    return not isinstance(value, str)


@contextmanager
def _named(optimizer: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise ConfigurationError(
            f"the outer optimizer {optimizer} cannot take a step on a dense one-dimensional tensor, which is what it is "
            f"given: {type(error).__name__}: {error}"
        ) from error


def _pieces(cuts: Sequence[int]) -> list[Piece]:
    return [Piece(0, start, stop) for start, stop in pairwise(cuts)]

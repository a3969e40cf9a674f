"""Trying whether an optimizer can take the outer steps, on a small tensor, whole and cut into pieces.

Each replica updates its own shards, chunk by chunk, and a shard may pass from one replica to another. So the update of an
element must depend on that element alone, and the optimizer's state must be such that it can be published: tensors with one
number per element, and numbers that are the same for all elements.
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
from .._generators import undisturbed
from .._terms._terms import OuterGroup
from ._optimizer import OuterOptimizer, make

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ._optimizer import OuterOptimizerFactory

_NUMEL = 97
# Where the tensor is cut. Shards and chunks begin at multiples of 16, so that vectorised kernels round equally in all of them.
_CUTS, _OTHER_CUTS = (0, 16, 64, _NUMEL), (0, 48, _NUMEL)
# How large the gradients of each step are: a limit on norms has no effect on small gradients, and shows with large ones.
_SCALES = (1.0, 1e-3, 1e3, 0.0, 1e6, 1.0)
_SAVED_AFTER = 3
_SEED = 20231114


def try_out(factory: OuterOptimizerFactory) -> None:
    """Refuse an optimizer that cannot take the outer steps of shards.

    The state of the caller's random generators does not change.

    Args:
        factory: Makes the optimizer from a list of parameters.

    Raises:
        ConfigurationError: The optimizer cannot be made, cannot step, is not element-wise, or keeps a state that cannot be
            published.
    """
    # On the CPU, whatever torch's default device is, since outer steps are taken on the CPU.
    with undisturbed(), torch.device("cpu"):
        generator = torch.Generator("cpu").manual_seed(_SEED)
        start = torch.randn(_NUMEL, generator=generator, dtype=torch.float32)
        gradients = [
            torch.randn(_NUMEL, generator=generator, dtype=torch.float32) * scale
            for scale in _SCALES
        ]
        expected = _steps_of_whole(factory, start, gradients)
        values = start.clone()
        outer, moved, loaded = (OuterOptimizer([OuterGroup(factory)]) for _ in range(3))
        _compare_steps(outer, _CUTS, values, gradients[:_SAVED_AFTER], expected[:_SAVED_AFTER])
        pieces = _pieces(_CUTS)
        _check_state(outer, pieces)
        # `moved`: another replica takes over the pieces. `loaded`: a checkpoint is loaded, with chunks of another size.
        moved_values, loaded_values = values.clone(), values.clone()
        for piece in pieces:
            state = {name: tensor.clone() for name, tensor in outer.tensors(piece).items()}
            part = moved_values[piece.start : piece.stop]
            moved.install(piece, part, state, outer.scalars(piece))
        loaded.load_state_dict(copy.deepcopy(outer.state_dict()))
        later_gradients, later_expected = gradients[_SAVED_AFTER:], expected[_SAVED_AFTER:]
        when = "after its state was saved and loaded"
        _compare_steps(outer, _CUTS, values, later_gradients, later_expected)
        _compare_steps(loaded, _OTHER_CUTS, loaded_values, later_gradients, later_expected, when)
        _compare_steps(moved, _CUTS, moved_values, later_gradients, later_expected, when)


def _steps_of_whole(
    factory: OuterOptimizerFactory, start: torch.Tensor, gradients: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The values after each step of an optimizer that has all of them in one tensor."""
    parameter = torch.nn.Parameter(start.clone())
    optimizer = make(factory, [parameter])
    values_by_step = []
    for gradient in gradients:
        parameter.grad = gradient.clone()
        with _named(type(optimizer).__name__):
            optimizer.step()
        values_by_step.append(parameter.detach().clone())
    return values_by_step


def _compare_steps(
    outer: OuterOptimizer,
    cuts: Sequence[int],
    values: torch.Tensor,
    gradients: Sequence[torch.Tensor],
    expected: Sequence[torch.Tensor],
    when: str = "",
) -> None:
    """Take the same steps piece by piece, and compare the values with those of the whole tensor."""
    for gradient, expected_values in zip(gradients, expected, strict=True):
        for piece in _pieces(cuts):
            part = slice(piece.start, piece.stop)
            with _named(outer.name):
                outer.step(piece, values[part], gradient[part].clone())
        if not torch.allclose(values, expected_values, rtol=1e-5, atol=1e-7, equal_nan=True):
            problem = (
                f"gives other values {when}: something that its steps depend on is not in its state"
                if when
                else "is not element-wise: it gives other values for a tensor that is cut into pieces than for the whole tensor"
            )
            raise ConfigurationError(
                f"the outer optimizer {outer.name} {problem}. Each replica updates only a part of the values, so the update of "
                "an element must depend only on that element's gradients and state: use an optimizer without norms, trust "
                "ratios and clipping."
            )


def _check_state(outer: OuterOptimizer, pieces: Sequence[Piece]) -> None:
    for piece in pieces:
        for name, value in outer.state(piece).items():
            if isinstance(value, torch.Tensor) and value.dim():
                fits = value.shape == (piece.numel,) and value.dtype is torch.float32
                description = f"a tensor of shape {list(value.shape)} and dtype {value.dtype}"
            else:
                fits = value is None or _is_number(value)
                description = f"{kind_of(value)}"
            if not isinstance(name, str) or not fits:
                raise ConfigurationError(
                    f"the outer optimizer {outer.name} keeps {name!r}, {description}, in its state of {piece.numel} float32 "
                    "values, but only numbers, and tensors with the shape and dtype of the values, can be published: use another "
                    "optimizer"
                )


def _is_number(value: object) -> bool:
    try:
        float(value)  # type: ignore[arg-type] # to find out whether this works
    except (TypeError, ValueError):
        return False
    return not isinstance(value, str)


@contextmanager
def _named(optimizer: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise ConfigurationError(
            f"the outer optimizer {optimizer} cannot take a step on a dense one-dimensional tensor, which it must be able to do: "
            f"{type(error).__name__}: {error}"
        ) from error


def _pieces(cuts: Sequence[int]) -> list[Piece]:
    return [Piece(0, start, stop) for start, stop in pairwise(cuts)]

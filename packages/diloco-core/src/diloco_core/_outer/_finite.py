"""Whether values stay finite when they are rounded to the model's dtypes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from .._squares import sum_of_squares

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .._arithmetic._layout import Piece
    from .._model._segments import Segment, Segments

# Numbers below these stay finite when they are rounded to the dtype: half a step above its largest finite number.
_ROUNDS_TO_INFINITY = {torch.float16: 65520.0, torch.bfloat16: 2.0**128 - 2.0**119}


def square_bound(dtype: torch.dtype, segments: Sequence[Segment]) -> float:
    """A bound for the sum of a chunk's squares: below it, all values of the chunk are finite in the model's dtypes."""
    narrowest = min(
        (_ROUNDS_TO_INFINITY.get(s.named.tensor.dtype, math.inf) for s in segments),
        default=math.inf,
    )
    return min(narrowest**2, torch.finfo(dtype).max) if dtype.is_floating_point else math.inf


def not_finite(
    segments: Segments, piece: Piece, values: torch.Tensor, bound: float
) -> tuple[str, torch.dtype] | None:
    """The name and the dtype of a tensor in which a chunk's values would be NaN or infinite; None if there is none.

    Args:
        segments: The tensors.
        piece: Where the chunk is.
        values: Its values.
        bound: What :func:`square_bound` returned for its group.
    """
    # The sum of squares is a bound for every value, and shows NaN and infinity. It costs less than a tenth of the step.
    if not values.is_floating_point() or sum_of_squares(values) < bound:
        return None
    for segment, start, stop in segments.parts(piece):
        dtype = segment.named.tensor.dtype
        if not values[start - piece.start : stop - piece.start].to(dtype).isfinite().all():
            return segment.named.name, dtype
    return None

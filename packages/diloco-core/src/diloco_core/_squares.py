"""Looking for NaN and infinity in the sum of squares of a chunk, or in its sum.

The sum of squares also bounds every value.
"""

import math

import torch


def sum_of_squares(values: torch.Tensor) -> float:
    """Return the sum of the squares of values.

    It is infinite or NaN if a value is, or if the sum is too large for the dtype. It costs a tenth
    of looking at each value. Not ``torch.dot``, which is as fast, but starts threads of the linear
    algebra library, whatever :func:`._exchange._one_thread.one_thread` says.
    """
    norm: float = torch.linalg.vector_norm(values).item()
    return norm * norm


def not_finite(values: torch.Tensor) -> int | None:
    """The index of an element that is NaN or infinite; None if there is none."""
    # It always shows in the sum, which costs a fifth of isfinite(). A sum of finite values can
    # overflow, though.
    if math.isfinite(values.sum().item()):
        return None
    wrong = values.isfinite().logical_not()
    return int(wrong.nonzero()[0].item()) if bool(wrong.any()) else None

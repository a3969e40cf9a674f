"""What sparse codecs may send of values. Rounding decides which of many equal ones they are, so there may be several answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from diloco_core._codecs._codec import Codec

_ROUNDING = 1e-4  # of sums that replicas have computed in another order


def sent_of(codec: Codec, values: torch.Tensor, read: torch.Tensor) -> torch.Tensor:
    """What a codec sends of values: what was read, if it may be that, and otherwise what the codec would send here.

    Args:
        codec: A sparse one.
        values: What was to be sent, fp32.
        read: What was read, of the same shape.
    """
    sent, again = torch.empty_like(values), torch.empty_like(values)
    codec.decode(codec.encode(values), sent)
    # If it had been chosen of nothing but what was read, the codec would have made the same of it.
    chosen = values.where(read != 0, 0.0)
    codec.decode(codec.encode(chosen), again)
    # Of equal values any may be chosen, but all that are chosen are the largest ones.
    is_as_large = abs(float(chosen.norm() - values.where(sent != 0, 0.0).norm())) < _ROUNDING
    return read if is_as_large and is_near(read, again) else sent


def is_near(values: torch.Tensor, others: torch.Tensor) -> bool:
    """Whether values differ by rounding only."""
    return float((values - others).abs().max()) < _ROUNDING

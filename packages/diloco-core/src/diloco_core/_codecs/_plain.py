"""Send every value by itself: as it is in memory, or rounded to another dtype."""

from __future__ import annotations

import torch

from .._squares import sum_of_squares


class Plain:
    """Sends the bytes of the values unchanged; see :class:`._codec.Codec`."""

    name = "plain"
    plain = True
    block = 1

    def size(self, dtype: torch.dtype, numel: int) -> int:
        """The size in memory."""
        return numel * dtype.itemsize

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Return a view of the values."""
        return values.view(torch.uint8)

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        """Copy the bytes. Readers avoid this by reading directly into ``out``."""
        out.view(torch.uint8).copy_(data)


PLAIN = Plain()


def rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return values in another dtype, rounded to the nearest.

    Numbers that are too large for it become its largest number. NaN and infinity stay what they
    are.
    """
    if values.dtype is dtype:
        return values
    out, largest = values.to(dtype), torch.finfo(dtype).max
    # The sum of squares bounds every value. It costs much less than looking for infinity.
    if not sum_of_squares(values) < largest**2:
        limit = torch.full_like(out, largest).copysign(out)
        out = torch.where(out.isinf() & values.isfinite(), limit, out)
    return out


class Cast:
    """Sends values in another dtype (:func:`rounded`); see :class:`._codec.Codec`."""

    plain = False
    block = 1

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name = name
        self._dtype = dtype

    def size(self, dtype: torch.dtype, numel: int) -> int:  # noqa: ARG002
        """The size of so many values of its dtype."""
        return numel * self._dtype.itemsize

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Round the values."""
        return rounded(values, self._dtype).view(torch.uint8)

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        """Convert them back, which is exact."""
        out.copy_(data.view(self._dtype))

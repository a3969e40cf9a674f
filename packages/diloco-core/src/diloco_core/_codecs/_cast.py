"""Codecs that round values to a narrower dtype."""

from __future__ import annotations

import torch

from .._squares import sum_of_squares


class Cast:
    """Sends values in another dtype, rounded to the nearest; see :class:`._codec.Codec`.

    Numbers that are too large for the dtype become its largest number. NaN and infinity stay what
    they are.
    """

    plain = False
    block = 1

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name = name
        self._dtype = dtype
        self._largest = torch.finfo(dtype).max

    def size(self, dtype: torch.dtype, numel: int) -> int:  # noqa: ARG002
        """The size of so many values of its dtype."""
        return numel * self._dtype.itemsize

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Round the values."""
        if values.dtype is self._dtype:
            return values.view(torch.uint8)
        rounded = values.to(self._dtype)
        # The sum of squares bounds every value. It costs much less than looking for infinity.
        if not sum_of_squares(values) < self._largest**2:
            largest = torch.full_like(rounded, self._largest).copysign(rounded)
            rounded = torch.where(rounded.isinf() & values.isfinite(), largest, rounded)
        return rounded.view(torch.uint8)

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        """Convert them back, which is exact."""
        out.copy_(data.view(self._dtype))

"""Values as they are in memory."""

from __future__ import annotations

import torch


class Plain:
    """The bytes are those of the values; see :class:`._codec.Codec`."""

    name = "plain"
    plain = True

    def size(self, dtype: torch.dtype, numel: int) -> int:
        """As in memory."""
        return numel * dtype.itemsize

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """A view of the values."""
        return values.view(torch.uint8)

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        """A copy; readers read into ``out`` at once instead."""
        out.view(torch.uint8).copy_(data)


PLAIN = Plain()

"""The codec that sends values as they are in memory."""

from __future__ import annotations

import torch


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

"""Eight bits per value, with a scale per block."""

from __future__ import annotations

import torch

from ._blocks import BlockCodec, work

_SCALE_BYTES = 4
_LEVELS = 127
# Scales below it would make numbers that some processors take for zero, and others do not.
_SMALLEST = torch.finfo(torch.float32).tiny
_LARGEST_SCALE = (torch.finfo(torch.float32).max / _LEVELS) * (1 - 2**-23)
# Largest magnitudes of blocks between these bounds have a scale that needs no correction.
_ORDINARY = 2.0**-118, 2.0**127


class Int8(BlockCodec):
    """int8: a float32 scale for each block of 256 values, and a number from -127 to 127 per value.

    The scale is the block's largest magnitude divided by 127. A decoded value differs from the
    original by half a scale at most (plus its rounding to float32). A block whose largest magnitude
    is below 1.5e-36 becomes zeros.
    """

    def __init__(self) -> None:
        super().__init__("int8", 256)

    def row_bytes(self, numel: int) -> int:
        """A scale, and a byte per value."""
        return _SCALE_BYTES + numel

    def encode_rows(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Divide by the scale and round."""
        values = torch.abs(rows, out=work(0, rows))
        largest = values.amax(1, keepdim=True)
        scale = divisor = largest / _LEVELS
        least, most = largest.aminmax()
        if not (least.item() >= _ORDINARY[0] and most.item() <= _ORDINARY[1]):
            scale.masked_fill_(scale < _SMALLEST, 0.0)
            # The product of a rounded scale and 127 may be infinite where the largest magnitude is
            # not.
            too_large = (scale * _LEVELS).isinf() & largest.isfinite()
            scale.masked_fill_(too_large, _LARGEST_SCALE)
            divisor = scale.masked_fill(scale == 0.0, torch.inf)
        torch.div(rows, divisor, out=values)
        out[:, :_SCALE_BYTES].copy_(scale.view(torch.uint8))
        out[:, _SCALE_BYTES:].view(torch.int8).copy_(values.round_())

    def decode_rows(self, data: torch.Tensor, out: torch.Tensor) -> None:
        """Multiply by the scale."""
        # A copy can be viewed as another dtype, wherever in a file the data begin.
        scale = data[:, :_SCALE_BYTES].clone(memory_format=torch.contiguous_format)
        out.copy_(data[:, _SCALE_BYTES:].view(torch.int8)).mul_(scale.view(torch.float32))

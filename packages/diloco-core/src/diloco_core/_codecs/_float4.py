"""Four bits per value: floating-point numbers with a power of two as the scale of each block."""

from __future__ import annotations

import numpy as np
import torch

from ._blocks import BlockCodec, work

_SCALE_BYTES = 1
_MANTISSA_BITS = 23
_BIAS = 127
_LEAST_EXPONENT, _LARGEST_EXPONENT = 2, 253
"""The exponents between which a block's smallest magnitude and 1 / scale are normal numbers."""
_NOT_A_NUMBER = 255
_INFINITY = 0x7F800000
_SIGN = 8
_MAGNITUDES = 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0
# A float of this size has no bits for fractions. To add it to a small positive number rounds that
# to the nearest whole number, ties to the even one, and the lowest byte of the sum is that number:
# one step in place of two.
_WHOLE = 2.0**_MANTISSA_BITS


class E2M1(BlockCodec):
    """e2m1: magnitudes 0, 0.5, 1, 1.5, 2, 3, 4 and 6, as in OCP Microscaling Formats (MX) v1.0.

    A block of 32 values becomes a byte for the scale and 16 bytes with two values each, the first
    in the lower half. A value has its sign in bit 3 and its magnitude in the others. The scale is 2
    to the power of its byte minus 127, which brings the block's largest magnitude between 4 and 8;
    a byte of 0 stands for a block of zeros, so that no number is so small that only some processors
    take it for zero, and 255 for NaN.

    Values are rounded to the nearest, ties to the even code, and what is above 6 becomes 6. So a
    decoded value differs from the original by at most a quarter of the block's largest magnitude. A
    block whose largest magnitude is below 2**-123 becomes zeros.
    """

    def __init__(self) -> None:
        super().__init__("e2m1", 32)
        cpu = torch.device("cpu")
        numbers = torch.tensor(_MAGNITUDES, dtype=torch.float32, device=cpu)
        signed = torch.cat((numbers, -numbers)) + 0.0  # without a negative zero
        # For every byte the two numbers that it stands for, as one element, so that they are looked
        # up together.
        pairs = torch.stack((signed.repeat(len(signed)), signed.repeat_interleave(len(signed))), 1)
        self._pairs = pairs.view(torch.int64).view(-1)
        # The byte of the scale for every exponent, and one over the scale, which is a normal number
        # for every byte that is used; or 0 for a block of zeros.
        exponents = torch.arange(256, dtype=torch.int32, device=cpu).clamp(max=_LARGEST_EXPONENT)
        exponents[:_LEAST_EXPONENT] = 0
        inverses = ((2 * _BIAS - exponents) << _MANTISSA_BITS).masked_fill_(exponents == 0, 0)
        self._scales, self._inverses = exponents.to(torch.uint8), inverses.view(torch.float32)
        # Tensors, because only a tensor can be added to a multiple of another one in one pass.
        self._by_half, self._by_two = torch.tensor(
            (_WHOLE, _WHOLE + 4), dtype=torch.float32, device=cpu
        )

    def row_bytes(self, numel: int) -> int:
        """A scale, and half a byte per value."""
        return _SCALE_BYTES + (numel + 1) // 2

    def encode_rows(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Divide by the scale, which is exact, and round to the magnitudes that there are."""
        magnitudes = torch.abs(rows, out=work(0, rows))
        # The bits of positive numbers are in the order of the numbers, with NaN at the end.
        largest = magnitudes.view(torch.int32).amax(1)
        exponents = (largest >> _MANTISSA_BITS).sub_(2).clamp_(min=0)
        inverses = self._inverses.index_select(0, exponents)
        codes = self._codes(magnitudes.mul_(inverses.unsqueeze(1)))
        # By numpy, since torch takes several times as long.
        negative = torch.from_numpy(np.signbit(rows.numpy()))
        codes.add_(negative.view(torch.int8), alpha=_SIGN)
        scales = self._scales.index_select(0, exponents)
        out[:, 0] = scales.masked_fill_(largest >= _INFINITY, _NOT_A_NUMBER)
        out[:, _SCALE_BYTES:].copy_(_packed(codes))

    def decode_rows(self, data: torch.Tensor, out: torch.Tensor) -> None:
        """Multiply by the scale, which is exact."""
        exponent = data[:, :_SCALE_BYTES].to(torch.int32)
        scale = (exponent << _MANTISSA_BITS).view(torch.float32)
        scale.masked_fill_(exponent == _NOT_A_NUMBER, torch.nan)
        codes = data[:, _SCALE_BYTES:].to(torch.int32)
        pairs = self._pairs.index_select(0, codes.view(-1)).view(torch.float32)
        torch.mul(pairs.view(len(out), -1)[:, : out.shape[1]], scale, out=out)

    def _codes(self, magnitudes: torch.Tensor) -> torch.Tensor:
        """Return scaled magnitudes as codes: int8 from 0 to 7.

        Magnitudes are rounded to multiples of 0.5 up to 2, of 1 up to 4, and of 2 beyond. Each of
        the three roundings is right in its own range, and gives a larger code than the right one
        elsewhere.
        """
        whole = work(1, magnitudes)
        codes = _lowest_byte(torch.add(self._by_half, magnitudes, alpha=2, out=whole))
        by_one = _lowest_byte(torch.add(magnitudes, _WHOLE + 2, out=whole))
        by_two = _lowest_byte(torch.add(self._by_two, magnitudes, alpha=0.5, out=whole))
        torch.minimum(torch.minimum(codes, by_one, out=codes), by_two, out=codes)
        return codes.clamp_(max=7)


def _packed(codes: torch.Tensor) -> torch.Tensor:
    """Pack two codes into a byte, the first in the lower half.

    An odd one at the end has a byte of its own.
    """
    if codes.shape[1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    # Two bytes at a time, the first of which is the lower one: the same with single bytes takes
    # several times as long.
    pairs = codes.view(torch.int16)
    return pairs.bitwise_or(pairs >> 4).to(torch.uint8)


def _lowest_byte(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int32).to(torch.int8)

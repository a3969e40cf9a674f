"""Four bits per value: floating-point numbers of four bits, with a power of two as the scale of each block.

A block of 32 values becomes a byte for the scale and 16 bytes with two values each, the first in the lower half. A value has
its sign in bit 3 and its magnitude in the others. The scale is 2 to the power of its byte minus 127; a byte of 0 stands for a
block of zeros, so that no number is so small that only some processors take it for zero, and 255 for NaN.
"""

from __future__ import annotations

from abc import abstractmethod

import numpy as np
import torch

from ._blocks import BlockCodec, work

_SCALE_BYTES = 1
_BLOCK = 32
MANTISSA_BITS = 23
BIAS = 127
LARGEST_EXPONENT = 253
_EXPONENTS = 256
NOT_A_NUMBER = 255
INFINITY = 0x7F800000
SIGN = 8
_CODES = 16
# A float of this size has no bits for fractions. To add it to a small positive number rounds that to the nearest whole number,
# ties to the even one, and the lowest byte of the sum is that number: one step in place of two.
_WHOLE = 2.0**MANTISSA_BITS


class _Float4(BlockCodec):
    def __init__(self, name: str) -> None:
        super().__init__(name, _BLOCK)
        numbers = self.numbers(torch.arange(SIGN, dtype=torch.uint8, device="cpu")).float()
        signed = torch.cat((numbers, -numbers)) + 0.0  # without a negative zero
        # For every byte the two numbers that it stands for, as one element, so that they are looked up together.
        pairs = torch.stack((signed.repeat(_CODES), signed.repeat_interleave(_CODES)), 1)
        self._pairs = pairs.view(torch.int64).view(-1)
        # The byte of the scale for every exponent, and one over the scale, which is a normal number for every byte that is used;
        # or 0 for a block of zeros.
        exponents = torch.arange(_EXPONENTS, dtype=torch.int32, device="cpu").clamp(
            max=LARGEST_EXPONENT
        )
        exponents.masked_fill_(exponents < self.least_exponent, 0)
        inverses = ((2 * BIAS - exponents) << MANTISSA_BITS).masked_fill_(exponents == 0, 0)
        self._scales, self._inverses = exponents.to(torch.uint8), inverses.view(torch.float32)

    def row_bytes(self, numel: int) -> int:
        """A scale, and half a byte per value."""
        return _SCALE_BYTES + (numel + 1) // 2

    def encode_rows(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Divide by the scale, which is exact, and round to the magnitudes that there are."""
        magnitudes = torch.abs(rows, out=work(0, rows))
        # The bits of positive numbers are in the order of the numbers, with NaN at the end.
        largest = magnitudes.view(torch.int32).amax(1)
        exponents = self.exponents(largest)
        inverses = self._inverses.index_select(0, exponents)
        codes = self.codes(magnitudes.mul_(inverses.unsqueeze(1)))
        # By numpy, since torch takes several times as long.
        negative = torch.from_numpy(np.signbit(rows.numpy()))
        codes.add_(negative.view(torch.int8), alpha=SIGN)
        scales = self._scales.index_select(0, exponents)
        out[:, 0] = scales.masked_fill_(largest >= INFINITY, NOT_A_NUMBER)
        out[:, _SCALE_BYTES:].copy_(_packed(codes))

    def decode_rows(self, data: torch.Tensor, out: torch.Tensor) -> None:
        """Multiply whole numbers by the scale, which is exact."""
        exponent = data[:, :_SCALE_BYTES].to(torch.int32)
        scale = (exponent << MANTISSA_BITS).view(torch.float32)
        scale.mul_(self.unit).masked_fill_(exponent == NOT_A_NUMBER, torch.nan)
        codes = data[:, _SCALE_BYTES:].to(torch.int32)
        if out.shape[1] % 2 == 0 and out.storage_offset() % 2 == 0:
            torch.index_select(self._pairs, 0, codes.view(-1), out=out.view(torch.int64).view(-1))
            out.mul_(scale)
        else:
            pairs = self._pairs[codes].view(torch.float32)
            torch.mul(pairs[:, : out.shape[1]], scale, out=out)

    #: What the number 1 of :meth:`numbers` stands for. Its product with every scale that is used is a normal number.
    unit: float

    #: Of the exponents, the least one for which the smallest magnitude is a normal number.
    least_exponent: int

    @abstractmethod
    def exponents(self, largest: torch.Tensor) -> torch.Tensor:
        """The exponents of the scales for the bits of the blocks' largest magnitudes, from 0 to 255; both int32."""

    @abstractmethod
    def codes(self, magnitudes: torch.Tensor) -> torch.Tensor:
        """Scaled magnitudes, rounded, as int8 from 0 to 7. May overwrite ``magnitudes``."""

    @abstractmethod
    def numbers(self, codes: torch.Tensor) -> torch.Tensor:
        """What codes from 0 to 7 stand for, as whole multiples of ``unit``; both uint8."""


class E2M1(_Float4):
    """e2m1: magnitudes 0, 0.5, 1, 1.5, 2, 3, 4 and 6, by the rules of the OCP Microscaling Formats (MX), v1.0.

    The scale is the power of two that brings a block's largest magnitude between 4 and 8. Values are rounded to the nearest,
    ties to the even code, and what is above 6 becomes 6. So a decoded value differs from the original by at most a quarter of
    the block's largest magnitude. A block whose largest magnitude is below 2**-123 becomes zeros.
    """

    unit = 0.5
    least_exponent = 2

    def __init__(self) -> None:
        super().__init__("e2m1")
        # Tensors, because only a tensor can be added to a multiple of another one in one pass.
        whole = torch.tensor((_WHOLE, _WHOLE + 4), dtype=torch.float32, device="cpu")
        self._by_half, self._by_two = whole

    def exponents(self, largest: torch.Tensor) -> torch.Tensor:
        """Those of the largest magnitudes, less that of 4."""
        return (largest >> MANTISSA_BITS).sub_(2).clamp_(min=0)

    def codes(self, magnitudes: torch.Tensor) -> torch.Tensor:
        """Round to multiples of 0.5 up to 2, of 1 up to 4, and of 2 beyond.

        Each of the three roundings is right in its own range, and gives a larger code than the right one elsewhere.
        """
        whole = work(1, magnitudes)
        codes = _lowest_byte(torch.add(self._by_half, magnitudes, alpha=2, out=whole))
        by_one = _lowest_byte(torch.add(magnitudes, _WHOLE + 2, out=whole))
        by_two = _lowest_byte(torch.add(self._by_two, magnitudes, alpha=0.5, out=whole))
        torch.minimum(torch.minimum(codes, by_one, out=codes), by_two, out=codes)
        return codes.clamp_(max=7)

    def numbers(self, codes: torch.Tensor) -> torch.Tensor:
        """Twice the magnitudes: 0, 1, 2, 3, 4, 6, 8, 12."""
        signed = codes.view(torch.int8)
        doubled = signed.mul(2).sub_(4)
        return torch.maximum(torch.maximum(signed, doubled), doubled.mul(2).sub_(8)).view(
            torch.uint8
        )


class E3M0(_Float4):
    """e3m0: magnitudes 0 and 1/64, 1/32 … 1, as in Streaming DiLoCo (arXiv 2501.18512), which does not say how it scales them.

    The scale is a block's largest magnitude, rounded up to a power of two. Values are rounded to the nearest magnitude, ties
    to the larger one. So a decoded value differs from the original by at most a third of it, or by 1/128 of the scale. A block
    whose largest magnitude is below 2**-119 becomes zeros, and what is above 2**126 becomes 2**126.
    """

    unit = 1 / 64
    least_exponent = 8

    def __init__(self) -> None:
        super().__init__("e3m0")

    def exponents(self, largest: torch.Tensor) -> torch.Tensor:
        """Those of the largest magnitudes, rounded up. The bits of NaN may overflow, and get a scale like that of zeros."""
        rounded_up = (largest + ((1 << MANTISSA_BITS) - 1)) >> MANTISSA_BITS
        return rounded_up.clamp_(min=0)

    def codes(self, magnitudes: torch.Tensor) -> torch.Tensor:
        """Count from the exponent, which half a unit of the mantissa raises from three quarters of the next power on."""
        # Between a half and three quarters of the smallest magnitude, values are raised to three quarters of it.
        raised = torch.mul(magnitudes, 1.5, out=work(1, magnitudes)).clamp_(max=0.75 / 64)
        bits = torch.maximum(magnitudes, raised, out=magnitudes).view(torch.int32)
        exponents = bits.add_(1 << (MANTISSA_BITS - 1)).bitwise_right_shift_(MANTISSA_BITS)
        return exponents.to(torch.int8).sub_(BIAS - 7).clamp_(0, 7)

    def numbers(self, codes: torch.Tensor) -> torch.Tensor:
        """64 times the magnitudes: 0, 1, 2, 4 … 64."""
        return torch.bitwise_left_shift(1, codes) >> 1


def _packed(codes: torch.Tensor) -> torch.Tensor:
    """Two codes in a byte, the first in the lower half; an odd one at the end has a byte of its own."""
    if codes.shape[1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    # Two bytes at a time, the first of which is the lower one: the same with single bytes takes several times as long.
    pairs = codes.view(torch.int16)
    return pairs.bitwise_or(pairs >> 4).to(torch.uint8)


def _lowest_byte(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int32).to(torch.int8)

"""What the codecs do to whole blocks, as functions without side effects, which is what torch's compiler needs.

The codecs themselves do the same in fewer passes over memory. Tests, and :mod:`._compiled` at run time, compare the bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from . import _float4, _int8

if TYPE_CHECKING:
    from collections.abc import Callable


class Formula(NamedTuple):
    """How the blocks of a codec are encoded and decoded.

    Attributes:
        encode: From float32 ``(blocks, elements)`` to the head of each block, ``(blocks, 1)``, and its body, uint8
            ``(blocks, bytes)``; and what its values were divided or multiplied by, float32 ``(blocks, 1)``. Compiled code
            keeps what it returns. What it does not return, it computes again for every few values.
        decode: From uint8 ``(blocks, bytes)``, heads and bodies together, to the bits of float32 ``(blocks, elements)``, in
            the dtype ``decoded``.
        head: Dtype of a head: that of the scale as it is sent.
        decoded: torch.float32; or torch.int64, for two values in an element.
    """

    encode: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    decode: Callable[[torch.Tensor], torch.Tensor]
    head: torch.dtype
    decoded: torch.dtype


def _int8_encode(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    largest = rows.abs().amax(1, keepdim=True)
    scale = largest / _int8.LEVELS
    scale = torch.where(scale < _int8.SMALLEST, 0.0, scale)
    too_large = (scale * _int8.LEVELS).isinf() & largest.isfinite()
    scale = torch.where(too_large, _int8.LARGEST_SCALE, scale)
    divisor = torch.where(scale == 0.0, torch.inf, scale)
    # Compiled code is slow to convert floats to bytes, and numbers below zero to uint8.
    steps = (rows / divisor).round().to(torch.int32) & 255
    return scale, steps.to(torch.uint8), divisor


def _int8_decode(data: torch.Tensor) -> torch.Tensor:
    # The scale byte by byte, since a block may begin anywhere in memory.
    head, body = data[:, :4].to(torch.int32), (data[:, 4:].to(torch.int32) << 24) >> 24
    low = head[:, 0:1] | (head[:, 1:2] << 8)
    scale = low | (head[:, 2:3] << 16) | (head[:, 3:4] << 24)
    return body.to(torch.float32) * scale.view(torch.float32)


def _e2m1_exponent(largest: torch.Tensor) -> torch.Tensor:
    exponent = (largest >> _float4.MANTISSA_BITS) - 2
    return torch.where(exponent < 2, 0, exponent)


def _e2m1_codes(magnitudes: torch.Tensor) -> torch.Tensor:
    by_half, by_one = (magnitudes * 2.0).round(), magnitudes.round() + 2
    by_two = (magnitudes * 0.5).round() + 4
    return torch.minimum(torch.minimum(by_half, by_one), by_two).clamp(max=7).to(torch.int32)


def _e2m1_numbers(codes: torch.Tensor) -> torch.Tensor:
    return torch.maximum(torch.maximum(codes, 2 * codes - 4), 4 * codes - 16)


def _e3m0_exponent(largest: torch.Tensor) -> torch.Tensor:
    exponent = (largest + ((1 << _float4.MANTISSA_BITS) - 1)) >> _float4.MANTISSA_BITS
    return torch.where(exponent < 8, 0, exponent)


def _e3m0_codes(magnitudes: torch.Tensor) -> torch.Tensor:
    raised = torch.maximum(magnitudes, (magnitudes * 1.5).clamp(max=0.75 / 64)).view(torch.int32)
    exponents = (raised + (1 << (_float4.MANTISSA_BITS - 1))) >> _float4.MANTISSA_BITS
    return (exponents - (_float4.BIAS - 7)).clamp(0, 7)


def _e3m0_numbers(codes: torch.Tensor) -> torch.Tensor:
    return (1 << codes) >> 1


def _float4_formula(
    exponent_of: Callable[[torch.Tensor], torch.Tensor],
    codes_of: Callable[[torch.Tensor], torch.Tensor],
    numbers_of: Callable[[torch.Tensor], torch.Tensor],
    unit: float,
) -> Formula:
    bits, sign = _float4.MANTISSA_BITS, _float4.SIGN

    def encode(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        magnitudes = rows.abs()
        largest = magnitudes.amax(1, keepdim=True).view(torch.int32)
        exponent = exponent_of(largest).clamp(0, _float4.LARGEST_EXPONENT)
        inverse = torch.where(exponent == 0, 0, (2 * _float4.BIAS - exponent) << bits)
        inverse = inverse.view(torch.float32)
        codes = codes_of(magnitudes * inverse) | ((rows.view(torch.int32) >> 28) & sign)
        pairs = codes.view(rows.shape[0], -1, 2)
        body = (pairs[:, :, 0] | (pairs[:, :, 1] << 4)).to(torch.uint8)
        exponent = torch.where(largest >= _float4.INFINITY, _float4.NOT_A_NUMBER, exponent)
        return exponent.to(torch.uint8), body, inverse

    def decode(data: torch.Tensor) -> torch.Tensor:
        exponent, pairs = data[:, :1].to(torch.int32), data[:, 1:].to(torch.int32)
        scale = (exponent << bits).view(torch.float32) * unit
        scale = torch.where(exponent == _float4.NOT_A_NUMBER, torch.nan, scale)
        # Both values of a byte in one element: compiled code is slow to store every second element.
        first, second = decode_half(pairs & 15, scale), decode_half(pairs >> 4, scale)
        return (first & 0xFFFFFFFF) | (second << 32)

    def decode_half(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        numbers = numbers_of(codes & 7)
        numbers = torch.where((codes & sign) != 0, -numbers, numbers).to(torch.float32)
        return (numbers * scale).view(torch.int32).to(torch.int64)

    return Formula(encode, decode, torch.uint8, torch.int64)


FORMULAS = {
    "int8": Formula(_int8_encode, _int8_decode, torch.float32, torch.float32),
    "e2m1": _float4_formula(_e2m1_exponent, _e2m1_codes, _e2m1_numbers, _float4.E2M1.unit),
    "e3m0": _float4_formula(_e3m0_exponent, _e3m0_codes, _e3m0_numbers, _float4.E3M0.unit),
}
"""By the name of the codec."""

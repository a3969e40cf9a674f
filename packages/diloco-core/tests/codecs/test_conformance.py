"""Every codec of ours does what every codec has to do, and what it states."""

import torch

from diloco_core._codecs._named import CODECS
from diloco_core.testing import CodecConformance

TINY = torch.finfo(torch.float32).tiny
LARGEST = torch.finfo(torch.float32).max


def half_a_step(values, dtype):
    """Return how far rounding to a dtype may move values, of which too large ones are clamped."""
    of = torch.finfo(dtype)
    relative = (values.abs() * of.eps / 2).clamp(min=of.smallest_normal * of.eps / 2)
    return torch.maximum(relative, values.abs() - of.max)


class TestPlain(CodecConformance):
    def make(self):
        return CODECS["plain"]

    def error(self, values):
        return torch.zeros_like(values)


class TestFp32(CodecConformance):
    def make(self):
        return CODECS["fp32"]

    def error(self, values):
        return half_a_step(values, torch.float32)


class TestBf16(CodecConformance):
    def make(self):
        return CODECS["bf16"]

    def error(self, values):
        return half_a_step(values, torch.bfloat16)


class TestFp16(CodecConformance):
    def make(self):
        return CODECS["fp16"]

    def error(self, values):
        return half_a_step(values, torch.float16)


class TestInt8(CodecConformance):
    def make(self):
        return CODECS["int8"]

    def error(self, values):
        largest = values.abs().max()
        return torch.full_like(
            values, largest / 254 * (1 + 2**-15) if largest >= 1.5e-36 else 1.5e-36
        )


class TestE2M1(CodecConformance):
    def make(self):
        return CODECS["e2m1"]

    def error(self, values):
        return torch.full_like(values, max(values.abs().max() / 4, 2.0**-123))


class _TopK(CodecConformance):
    def error(self, values):
        """What is not sent is off by all of itself; what is sent, by no more than the values of its
        bin lie apart.
        """
        largest = values.abs().max()
        return torch.maximum(values.abs(), 2 * largest) * (1 + 2**-23) + TINY


class TestTopK64(_TopK):
    def make(self):
        return CODECS["topk64"]


class TestTopK128(_TopK):
    def make(self):
        return CODECS["topk128"]

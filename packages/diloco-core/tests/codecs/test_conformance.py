"""Every codec of ours does what every codec has to do, and what it states about its error."""

import threading

import pytest
import torch
from codecs_lab import CODECS, DENSE, SPARSE, TINY, decoded

from diloco_core.testing import CodecConformance

LARGEST = torch.finfo(torch.float32).max
SCALED = ("int8", "e2m1")


class Ours(CodecConformance):
    name = "plain"

    def make(self):
        return CODECS[self.name]


class TestPlain(Ours):
    def error(self, values):
        return torch.zeros_like(values)


class TestFp32(Ours):
    name, dtype = "fp32", torch.float32

    def error(self, values):
        """Return how far rounding to the dtype, with a clamp, may move values."""
        of = torch.finfo(self.dtype)
        relative = (values.abs() * of.eps / 2).clamp(min=of.smallest_normal * of.eps / 2)
        return torch.maximum(relative, values.abs() - of.max)


class TestBf16(TestFp32):
    name, dtype = "bf16", torch.bfloat16


class TestFp16(TestFp32):
    name, dtype = "fp16", torch.float16


class TestInt8(Ours):
    name = "int8"

    def error(self, values):
        largest = values.abs().max()
        step = largest / 254 * (1 + 2**-15) if largest >= 1.5e-36 else 1.5e-36
        return torch.full_like(values, step)


class TestE2M1(Ours):
    name = "e2m1"

    def error(self, values):
        return torch.full_like(values, max(values.abs().max() / 4, 2.0**-123))


class TestTopK64(Ours):
    name = "topk64"

    def error(self, values):
        """A value that is not sent is off by all of itself; another one by its bin at most."""
        return torch.maximum(values.abs(), 2 * values.abs().max()) * (1 + 2**-23) + TINY


class TestTopK128(TestTopK64):
    name = "topk128"


@pytest.mark.parametrize("name", [*SCALED, *SPARSE])
def test_no_number_comes_out_that_some_processors_take_for_zero(name):
    for exponent in range(-149, -100):
        out = decoded(name, torch.linspace(-1.0, 1.0, 41) * 2.0**exponent)
        assert bool(((out == 0) | (out.abs() >= TINY)).all())


@pytest.mark.parametrize("name", [*DENSE, *SPARSE])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_visible(name, bad):
    for place in (0, 20, 40):
        values = torch.linspace(-1.0, 1.0, 41)
        values[place] = bad
        assert not bool(decoded(name, values)[place].isfinite())


@pytest.mark.parametrize("name", DENSE)
def test_numbers_too_large_for_float32_become_large_ones(name):
    values = torch.tensor([1e300, -1e300, 1e39, 0.0], dtype=torch.float64)
    out = decoded(name, values)
    assert bool(out.isfinite().all())
    assert torch.equal(out.sign(), values.sign())
    assert bool((out.abs()[:3] >= min(65504.0, LARGEST / 4)).all())


@pytest.mark.parametrize("name", SCALED)
def test_a_thread_that_began_in_inference_mode_can_go_on_without(name):
    codec, values, encoded = CODECS[name], torch.randn(100), []

    def both():
        with torch.inference_mode():
            encoded.append(codec.encode(values))
        encoded.append(codec.encode(values).clone())

    thread = threading.Thread(target=both)
    thread.start()
    thread.join()
    assert torch.equal(*encoded)


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("numel", [31, 64, 300])
def test_values_may_begin_anywhere_in_memory(name, numel):
    codec = CODECS[name]
    values = torch.randn(numel, generator=torch.Generator().manual_seed(1))
    data, aligned = codec.encode(values), decoded(name, values)
    for begin in (1, 2, 3):
        out, place = torch.empty(numel + begin), torch.empty(len(data) + begin, dtype=torch.uint8)
        place[begin:].copy_(data)
        codec.decode(place[begin:], out[begin:])
        assert torch.equal(out[begin:], aligned)


@pytest.mark.parametrize("largest", [1.0, 2.0**-120, 2.0**-124, 2.0**-140])
def test_no_negative_zero_comes_out(largest):
    """The sign of a zero would depend on the codec, and replicas compare bits."""
    out = decoded("e2m1", torch.tensor([-0.0, -1e-9 * largest, -largest] * 11))
    assert not out[out == 0].signbit().any()

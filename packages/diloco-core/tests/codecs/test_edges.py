"""Codecs with a scale at the edges of what float32 holds."""

import threading

import pytest
import torch

from diloco_core._codecs._codec import is_sparse
from diloco_core._codecs._named import CODECS

SCALED = [CODECS[name] for name in ("int8", "e2m1")]
LOSSY = [codec for codec in CODECS.values() if not codec.plain]
TINY = torch.finfo(torch.float32).tiny
LARGEST = torch.finfo(torch.float32).max


def decoded(codec, values):
    out = torch.full_like(values, torch.nan)
    codec.decode(codec.encode(values), out)
    return out


def named(codec):
    return codec.name


@pytest.mark.parametrize("codec", SCALED, ids=named)
@pytest.mark.parametrize("exponent", range(-149, -100))
def test_no_number_comes_out_that_some_processors_take_for_zero(codec, exponent):
    out = decoded(codec, torch.linspace(-1.0, 1.0, 41) * 2.0**exponent)
    assert bool(((out == 0) | (out.abs() >= TINY)).all())


@pytest.mark.parametrize("codec", LOSSY, ids=named)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("at", [0, 20, 40])
def test_what_is_not_finite_stays_visible(codec, bad, at):
    values = torch.linspace(-1.0, 1.0, 41)
    values[at] = bad
    assert not bool(decoded(codec, values)[at].isfinite())


@pytest.mark.parametrize("codec", [codec for codec in LOSSY if not is_sparse(codec)], ids=named)
def test_numbers_too_large_for_float32_become_large_ones(codec):
    values = torch.tensor([1e300, -1e300, 1e39, 0.0], dtype=torch.float64)
    out = decoded(codec, values)
    assert bool(out.isfinite().all())
    assert torch.equal(out.sign(), values.sign())
    assert bool((out.abs()[:3] >= min(65504.0, LARGEST / 4)).all())


@pytest.mark.parametrize("codec", ["int8", "e2m1"])
def test_a_thread_that_began_in_inference_mode_can_go_on_without(codec):
    codec, values, encoded = CODECS[codec], torch.randn(100), []

    def both():
        with torch.inference_mode():
            encoded.append(codec.encode(values))
        encoded.append(codec.encode(values).clone())

    thread = threading.Thread(target=both)
    thread.start()
    thread.join()
    first, second = encoded
    assert torch.equal(first, second)


def test_e2m1_is_the_format_of_the_specification():
    """All magnitudes, and ties, which go to the code whose last bit is zero."""
    steps = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    ties = {0.25: 0.0, 0.75: 1.0, 1.25: 1.0, 1.75: 2.0, 2.5: 2.0, 3.5: 4.0, 5.0: 4.0, 7.9: 6.0}
    values = torch.tensor([*steps, *ties])
    wanted = torch.tensor([*steps, *ties.values()])
    for scale in (1.0, 2.0**-20, 2.0**40):
        for sign in (1.0, -1.0):
            assert torch.equal(
                decoded(CODECS["e2m1"], sign * scale * values), sign * scale * wanted
            )


def test_the_bytes_of_e2m1():
    """The scale, then two values in a byte, the first in the lower half; 6.0 has the code 7, and
    the sign is bit 3.
    """
    data = CODECS["e2m1"].encode(torch.tensor([6.0, -1.0, 0.5]))
    assert data.tolist() == [127, 0x7 | 0xA << 4, 0x1]


@pytest.mark.parametrize("codec", SCALED, ids=named)
def test_blocks_do_not_disturb_each_other(codec):
    """A large value costs only its own block precision."""
    values = torch.linspace(-1.0, 1.0, 3 * codec.block)
    alone = decoded(codec, values)
    values[0] = 1e6
    assert torch.equal(decoded(codec, values)[codec.block :], alone[codec.block :])

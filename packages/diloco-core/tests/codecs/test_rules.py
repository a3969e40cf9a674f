"""The bytes of the codecs that encode blocks, compared with their rules as written down here, value
by value.
"""

import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from diloco_core._codecs._named import CODECS

#: Halves and eighths of powers of two meet the ties of every rule; the others come near them, or to
#: the ends of the range.
ELEMENTS = st.one_of(
    st.integers(-64, 64).map(lambda n: n / 8),
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.floats(-8, 8, width=32),
)
SCALES = st.one_of(st.just(0), st.integers(-149, 124))
BLOCKS = st.tuples(st.lists(ELEMENTS, min_size=1, max_size=36), SCALES)

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def values_of(block):
    numbers, scale = block
    with np.errstate(over="ignore"):
        values = np.array(numbers, np.float64) * 2.0**scale
        largest = float(np.finfo(np.float32).max)
        return torch.from_numpy(np.clip(values, -largest, largest).astype(np.float32))


def int8_of(row):
    """A scale of 1/127 of the largest magnitude, and the nearest whole multiples of it, ties to the
    even one.
    """
    tiny, most = float(np.finfo(np.float32).tiny), np.float32(np.finfo(np.float32).max)
    scale = np.float32(max(abs(x) for x in row)) / np.float32(127)
    if scale < tiny:
        scale = np.float32(0)
    with np.errstate(over="ignore"):
        while np.isinf(scale * np.float32(127)):
            scale = np.nextafter(scale, np.float32(0))
    assert scale <= most
    steps = [round(float(np.float32(x) / scale)) if scale else 0 for x in row]
    return struct.pack("<f", scale) + struct.pack(f"{len(row)}b", *steps)


def e2m1_of(row):
    """A power of two, and for each value its sign and the number of the nearest magnitude, ties to
    the even one.
    """
    largest = max(abs(x) for x in row)
    exponent = math.frexp(largest)[1] - 3 if largest else -200
    codes = []
    for x in row:
        m = abs(x) / 2.0**exponent
        distances = [abs(m - magnitude) for magnitude in E2M1]
        nearest = [n for n, distance in enumerate(distances) if distance == min(distances)]
        code = next((n for n in nearest if n % 2 == 0), nearest[0])
        codes.append(code + 8 * (math.copysign(1, x) < 0))
    byte = exponent + 127
    if byte < 2:
        byte, codes = 0, [8 * (math.copysign(1, x) < 0) for x in row]
    codes.append(0)
    pairs = zip(codes[: len(row) + 1 : 2], codes[1::2], strict=False)
    return bytes([byte, *(first | second << 4 for first, second in pairs)])


@pytest.mark.parametrize(("name", "rule"), [("int8", int8_of), ("e2m1", e2m1_of)])
@given(blocks=st.lists(BLOCKS, min_size=1, max_size=3))
@example(blocks=[([1 / 8, -1 / 8], -121), ([1.0], 0)])  # too small for a scale of e2m1
def test_the_bytes_follow_the_rules(name, rule, blocks):
    """With zeros in between, so that every block gets values of one list alone."""
    codec = CODECS[name]
    rows = [values_of(block)[: codec.block] for block in blocks]
    rows[:-1] = [torch.nn.functional.pad(row, (0, codec.block - len(row))) for row in rows[:-1]]
    wanted = b"".join(rule(row.tolist()) for row in rows)
    assert codec.encode(torch.cat(rows)).numpy().tobytes() == wanted


@pytest.mark.parametrize("name", ["int8", "e2m1"])
@pytest.mark.parametrize("numel", [31, 64, 300])
def test_values_may_begin_anywhere_in_memory(name, numel):
    codec = CODECS[name]
    values = torch.randn(numel, generator=torch.Generator().manual_seed(1))
    data = codec.encode(values)
    aligned = torch.empty(numel)
    codec.decode(data, aligned)
    for begin in (1, 2, 3):
        out, place = torch.empty(numel + begin), torch.empty(len(data) + begin, dtype=torch.uint8)
        place[begin:].copy_(data)
        codec.decode(place[begin:], out[begin:])
        assert torch.equal(out[begin:], aligned)


@pytest.mark.parametrize("largest", [1.0, 2.0**-120, 2.0**-124, 2.0**-140])
def test_no_negative_zero_comes_out(largest):
    """The sign of a zero would depend on the codec, and replicas compare bits."""
    codec = CODECS["e2m1"]
    data = codec.encode(torch.tensor([-0.0, -1e-9 * largest, -largest] * 11))
    out = torch.empty(33)
    codec.decode(data, out)
    assert not out[out == 0].signbit().any()

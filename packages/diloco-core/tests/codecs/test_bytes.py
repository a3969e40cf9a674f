"""The bytes of the codecs: those of before, and those that the rules give, value by value.

A run may be older than the code that resumes it.
"""

import math
import struct

import numpy as np
import pytest
import torch
import xxhash
from codecs_lab import CODECS
from hypothesis import example, given
from hypothesis import strategies as st

NUMEL = 2 * 65536 + 4096 + 700


def values():
    """Numbers of many sizes, exact on every machine, without two equal magnitudes."""
    index = torch.arange(1, NUMEL + 1)
    mixed = (index * 2654435761) % 2**23
    signs = 1 - 2 * (mixed >> 3 & 1)
    return (signs * mixed).float() * 2.0 ** -(index // 4096 % 7 + 20).float()


GOLDEN = {
    "plain": ("ad6f145ff9fd1058", "ad6f145ff9fd1058"),
    "fp32": ("ad6f145ff9fd1058", "ad6f145ff9fd1058"),
    "bf16": ("462a6efca06fbe52", "caf377e73422bb8e"),
    "fp16": ("65267047bab1d8de", "d5b33335990f9e3c"),
    "int8": ("6bf7818164f608ef", "b5128241da474b0b"),
    "e2m1": ("e9c34f9ea360666c", "cb1c4929849fdbd6"),
    "topk64": ("f9b8284cd3931e79", "ac67750d33e6f02d"),
    "topk128": ("2ed027db4576a603", "046b4ed594f37299"),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_the_bytes_are_what_they_were(name):
    codec, given = CODECS[name], values()
    data, out = codec.encode(given), torch.empty(NUMEL)
    codec.decode(data, out)
    found = tuple(xxhash.xxh3_64_hexdigest(tensor.numpy()) for tensor in (data, out))
    assert found == GOLDEN[name]


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
    """A scale of 1/127 of the largest magnitude, and its nearest multiples, ties to even ones."""
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
    """A power of two, and signs and numbers of the nearest magnitudes, ties to even ones."""
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
@example(blocks=[([127.0, 0.5, 1.5, 2.5, -0.5], 0)])  # ties of int8
@example(blocks=[([1 / 8, -1 / 8], -121), ([1.0], 0)])  # too small for a scale of e2m1
def test_the_bytes_follow_the_rules(name, rule, blocks):
    """With zeros in between, so that every block gets values of one list alone."""
    codec = CODECS[name]
    rows = [values_of(block)[: codec.block] for block in blocks]
    rows[:-1] = [torch.nn.functional.pad(row, (0, codec.block - len(row))) for row in rows[:-1]]
    wanted = b"".join(rule(row.tolist()) for row in rows)
    assert codec.encode(torch.cat(rows)).numpy().tobytes() == wanted

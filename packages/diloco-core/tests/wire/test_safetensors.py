"""The header of a safetensors file, against the library of the format."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load

from diloco_core import CorruptedObjectError
from diloco_core._wire._safetensors import (
    LENGTH_BYTES,
    SAFETENSORS_DTYPES,
    entry,
    header_bytes,
    header_size,
    parse_header,
    read_header,
)

LOADABLE = [dtype for dtype in SAFETENSORS_DTYPES if not dtype.is_complex]


class Opened:
    def __init__(self, data):
        self._data, self.size = data, len(data)

    def read_into(self, offset, buffer):
        buffer[:] = self._data[offset : offset + len(buffer)]


@given(
    st.lists(
        st.tuples(st.sampled_from(LOADABLE), st.lists(st.integers(0, 4), max_size=3)), max_size=4
    ),
    st.dictionaries(st.text(max_size=5), st.text(max_size=9), max_size=3),
)
def test_the_library_reads_what_is_written(tensors, metadata):
    entries, data = {}, b""
    for number, (dtype, shape) in enumerate(tensors):
        values = bytes(torch.Size(shape).numel() * dtype.itemsize)
        entries[str(number)] = entry(dtype, shape, len(data), len(data) + len(values))
        data += values
    header = header_bytes(entries, metadata)
    loaded = load(header + data)
    assert {name: (t.dtype, list(t.shape)) for name, t in loaded.items()} == {
        str(number): (dtype, shape) for number, (dtype, shape) in enumerate(tensors)
    }
    assert len(header) % 64 == 0
    assert header_size(header + data) == len(header)
    assert read_header(Opened(header + data), "x") == (header, parse_header(header + data))
    assert parse_header(header)["__metadata__"] == metadata


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "x has 0 bytes: it is truncated"),
        (b"1234567", "x has 7 bytes: it is truncated"),
        ((9).to_bytes(8, "little") + b"{}", "x does not begin with the header of a safetensors"),
        ((2**20 + 1).to_bytes(8, "little") + bytes(2**20 + 1), "does not begin with the header"),
        ((2).to_bytes(8, "little") + b"[]", "the header of x is damaged"),
        ((2).to_bytes(8, "little") + b"{]", "the header of x is damaged"),
        ((2).to_bytes(8, "little") + b"\xff\xff", "the header of x is damaged"),
        ((200_000).to_bytes(8, "little") + b"[" * 200_000, "the header of x is damaged"),
    ],
)
def test_what_is_no_header_is_refused(data, said):
    with pytest.raises(CorruptedObjectError, match=said):
        read_header(Opened(data), "x")


def test_a_header_says_its_length():
    header = header_bytes({}, {"a": "b"})
    text = header[LENGTH_BYTES:]
    assert int.from_bytes(header[:LENGTH_BYTES], "little") == len(text)
    assert json.loads(text) == {"__metadata__": {"a": "b"}}

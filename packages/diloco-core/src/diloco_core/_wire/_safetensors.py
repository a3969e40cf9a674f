"""The header of a safetensors file, written and read: https://huggingface.co/docs/safetensors.

It is eight bytes that say how long the following JSON is, and the JSON: for every tensor its dtype, its shape, and where in
the data after the header it lies. What a header says is not to be believed before its file's checksum has been compared.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch

from .._errors import CorruptedObjectError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .._store._api import ObjectReader

LENGTH_BYTES = 8
"""Before the JSON."""
MOST_HEADER_BYTES = 100_000_000
"""What the library of the format reads as a header."""

_MOST_READ_BYTES = (
    2**24
)  # of files that we write: far less than the above, which would be a lot of memory
_ALIGNMENT = 64

SAFETENSORS_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
"""What safetensors calls the dtypes that it knows."""


def entry(dtype: torch.dtype, shape: Sequence[int], start: int, stop: int) -> dict[str, object]:
    """What a header says of a tensor.

    Args:
        dtype: One of those that safetensors knows.
        shape: Its shape.
        start: Where in the data it begins, in bytes.
        stop: Where it ends.
    """
    name = SAFETENSORS_DTYPES[dtype]
    return {"dtype": name, "shape": list(shape), "data_offsets": [start, stop]}


def header_bytes(tensors: Mapping[str, object], metadata: Mapping[str, str]) -> bytes:
    """A header, its length included. The data after it begin at a multiple of 64 bytes.

    Args:
        tensors: An :func:`entry` for every tensor, in the order of the data.
        metadata: Texts of any kind.
    """
    fields = {"__metadata__": dict(metadata), **tensors}
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-(LENGTH_BYTES + len(text)) % _ALIGNMENT)  # which the format allows
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def header_size(data: bytes | bytearray | memoryview) -> int:
    """Where the data of a file begin, whose first bytes these are."""
    return LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "little")


def parse_header(data: bytes | bytearray | memoryview) -> dict[str, Any]:
    """What the header says with which these bytes begin.

    Raises:
        ValueError: It is no JSON object.
    """
    try:
        fields = json.loads(bytes(data[LENGTH_BYTES : header_size(data)]))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(fields, dict):
        raise ValueError(f"it is {type(fields).__name__}, not an object")  # noqa: TRY004 - of the file, not of the caller
    return fields


def read_header(reader: ObjectReader, origin: str) -> tuple[bytes, dict[str, Any]]:
    """The header of an open file: its bytes with their length before them, and what it says. Nothing is verified.

    Raises:
        CorruptedObjectError: It has none.
    """
    if reader.size < LENGTH_BYTES:
        raise CorruptedObjectError(f"{origin} has {reader.size} bytes: it is truncated")
    length = bytearray(LENGTH_BYTES)
    reader.read_into(0, memoryview(length))
    size = header_size(length) - LENGTH_BYTES
    if size > min(_MOST_READ_BYTES, reader.size - LENGTH_BYTES):
        raise CorruptedObjectError(f"{origin} does not begin with the header of a safetensors file")
    text = bytearray(size)
    reader.read_into(LENGTH_BYTES, memoryview(text))
    beginning = bytes(length + text)
    try:
        return beginning, parse_header(beginning)
    except ValueError:
        raise CorruptedObjectError(f"the header of {origin} is damaged") from None

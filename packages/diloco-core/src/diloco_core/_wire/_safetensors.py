"""Writing and reading the header of a safetensors file: https://huggingface.co/docs/safetensors.

It consists of eight bytes that hold the length of the following JSON, and the JSON: for each tensor
its dtype, its shape, and where it is in the data after the header. A header must not be trusted
before the checksum of its file was verified.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .._errors import CorruptedObjectError
from .._store._api import RECORD_BYTES, ObjectReader, read_bytes

LENGTH_BYTES = 8
"""Size of the length before the JSON."""
MOST_HEADER_BYTES = 100_000_000
"""The largest header that the safetensors library reads."""

# The largest header that is read here. Those that we write are smaller, and a damaged length must
# not take much memory.
_MOST_READ_BYTES = 2**20
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
"""The names that safetensors has for dtypes."""


def entry(dtype: torch.dtype, shape: Sequence[int], start: int, stop: int) -> dict[str, object]:
    """The entry of a tensor in a header.

    Args:
        dtype: Its dtype; one of :data:`SAFETENSORS_DTYPES`.
        shape: Its shape.
        start: The offset in the data at which it begins, in bytes.
        stop: The offset at which it ends.
    """
    name = SAFETENSORS_DTYPES[dtype]
    return {"dtype": name, "shape": list(shape), "data_offsets": [start, stop]}


def header_bytes(
    tensors: Mapping[str, object], metadata: Mapping[str, str], least: int = 0
) -> bytes:
    """The bytes of a header, including its length.

    The data after it begins at a multiple of 64 bytes.

    Args:
        tensors: An :func:`entry` for each tensor by its name, in the order of the data.
        metadata: Texts by name.
        least: How many bytes there are at least.
    """
    fields = {"__metadata__": dict(metadata), **tensors}
    content = json.dumps(fields, separators=(",", ":")).encode()
    size = max(LENGTH_BYTES + len(content), least)
    content = content.ljust(size + -size % _ALIGNMENT - LENGTH_BYTES)  # the format allows spaces
    return len(content).to_bytes(LENGTH_BYTES, "little") + content


def header_size(data: bytes | bytearray | memoryview) -> int:
    """The offset in bytes at which the data of a file begins, given its first bytes."""
    return LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "little")


def parse_header(data: bytes | bytearray | memoryview) -> dict[str, Any]:
    """The JSON of the header with which these bytes begin.

    Raises:
        ValueError: It is not a JSON object.
    """
    try:
        fields = json.loads(bytes(data[LENGTH_BYTES : header_size(data)]))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(fields, dict):
        # The file is wrong, not the caller
        raise ValueError(f"it is a {type(fields).__name__}, not a JSON object")  # noqa: TRY004
    return fields


def check_extent(reader: ObjectReader, origin: str) -> int:
    """Check that the tensors in a file's header fill the file, before all of it is read.

    Returns its size in bytes.

    A file that is as small as a record is read whatever it holds, so it is not checked here.

    Raises:
        CorruptedObjectError: They do not, or the file does not begin with a header.
    """
    if reader.size <= RECORD_BYTES:
        return reader.size
    beginning, fields = read_header(reader, origin, MOST_HEADER_BYTES)
    try:
        entries = [each for name, each in fields.items() if name != "__metadata__"]
        ends = [int(each["data_offsets"][1]) for each in entries]
    except (TypeError, KeyError, IndexError, ValueError, OverflowError):
        raise CorruptedObjectError(f"the header of {origin} is damaged") from None
    if len(beginning) + max(ends, default=0) != reader.size:
        raise CorruptedObjectError(
            f"{origin} has {reader.size} bytes, which are not those of the tensors in its header"
        )
    return reader.size


def read_header(
    reader: ObjectReader, origin: str, most: int = _MOST_READ_BYTES
) -> tuple[bytes, dict[str, Any]]:
    """The header of an open file: its bytes, including its length, and its JSON.

    Nothing is verified.

    Args:
        reader: The file.
        origin: What it is called in errors.
        most: The most bytes that the header may have.

    Raises:
        CorruptedObjectError: The file does not begin with a header.
    """
    if reader.size < LENGTH_BYTES:
        raise CorruptedObjectError(f"{origin} has {reader.size} bytes: it is truncated")
    length = read_bytes(reader, 0, LENGTH_BYTES)
    size = header_size(length) - LENGTH_BYTES
    if size > min(most, reader.size - LENGTH_BYTES):
        raise CorruptedObjectError(f"{origin} does not begin with the header of a safetensors file")
    beginning = length + read_bytes(reader, LENGTH_BYTES, LENGTH_BYTES + size)
    try:
        return beginning, parse_header(beginning)
    except ValueError:
        raise CorruptedObjectError(f"the header of {origin} is damaged") from None

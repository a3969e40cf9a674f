"""The reading of a message, which holds only as much of it as is allowed."""

from __future__ import annotations

import struct
from typing import Any

from grpclib.server import Stream

from .._workspace._refused import RefusedError

_HEAD = struct.Struct(">?I")


async def receive(stream: Stream[Any, Any], most: int) -> Any:
    """Return the message of a request; grpclib's own way reads whatever length is announced.

    Raises:
        RefusedError: it is longer than ``most``; it is not read then.
    """
    head = await _read(stream, _HEAD.size)
    compressed, size = _HEAD.unpack(head)
    if compressed:
        raise RefusedError("UNIMPLEMENTED", "the stand-in reads no compressed messages")
    if size > most:
        text = f"a message of {size} bytes; the stand-in reads at most {most}"
        raise RefusedError("RESOURCE_EXHAUSTED", text)
    data = await _read(stream, size)
    return stream._codec.decode(data, stream._recv_type)  # noqa: SLF001


async def _read(stream: Stream[Any, Any], size: int) -> bytes:
    try:
        data: bytes = await stream._stream.recv_data(size)  # noqa: SLF001 - with its flow control
    except AssertionError:  # the stream ended too early
        data = b""
    if len(data) < size:
        raise RefusedError("INVALID_ARGUMENT", "the message of this request is missing or cut off")
    return data

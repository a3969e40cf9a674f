"""Cut uploads into blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from .._api import Buffer
from ._blocks import new_buffer

MOST_PARTS = 10_000
"""The most parts of one upload that S3 accepts (https://docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html)."""

_SMALL = 2**16


class UploadBlocks(Iterator[Any]):
    """Yield the blocks of an upload.

    Attributes:
        error: The error that making them has raised, since a driver may wrap it in its own.
    """

    def __init__(self, blocks: Iterator[Buffer], first: Buffer | None = None) -> None:
        self.error: BaseException | None = None
        self._first = first
        self._blocks = blocks

    def __next__(self) -> Buffer:
        block, self._first = self._first, None  # it is let go as soon as it was sent
        if block is not None:
            return block
        try:
            return next(self._blocks)
        except StopIteration:
            raise
        except BaseException as error:
            self.error = error
            raise


def blocks_of(parts: Iterable[Buffer], size: int) -> Iterator[memoryview]:
    """Copy the bytes of all parts into new buffers of ``size`` bytes.

    The maker of a part may reuse it. Only the last buffer may be shorter. Large buffers are mapped
    from the system, so their memory goes back to it at once; the C library would keep much of it
    for later.
    """
    block = memoryview(bytearray(min(size, _SMALL)))
    end = 0
    for part in parts:
        view = memoryview(part).cast("B")
        while view:
            if end == len(block) < size:
                larger = new_buffer(size)
                larger[:end] = block
                block = larger
            count = min(len(view), len(block) - end)
            block[end : end + count] = view[:count]
            view = view[count:]
            end += count
            if end == size:
                yield block
                block, end = memoryview(b""), 0
    if end:
        yield block[:end]

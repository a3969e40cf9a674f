"""What goes up in parts: its blocks, and how many of them are on their way at the same time, in bounded memory."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from .._transfer import PART_BYTES, Transfer
from ._blocks import Transfers, new_buffer

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from .._api import Buffer

MOST_PARTS = 10_000
"""S3 takes no more (https://docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html)."""

_SMALL = 2**16


class Uploads:
    """How much memory the uploads of a store take from its budget. Thread-safe.

    Args:
        transfer: The store's settings.
        transfers: Its budget, which reads take from too.
    """

    def __init__(self, transfer: Transfer, transfers: Transfers) -> None:
        self._transfer = transfer
        self._transfers = transfers
        self._lock = threading.Lock()
        self._under_way = 0  # of those that hold copies

    @contextmanager
    def room(self, copies: int) -> Iterator[int]:
        """How many parts of an upload may be under way at once; they take their memory from the budget meanwhile.

        Args:
            copies: How often a part is held; 0 where it is sent as it is given.
        """
        transfers, at_once = self._transfers, self._transfer.connections
        with self._lock:
            if copies:
                # Only the first may have memory beyond the budget: several would add up.
                least = 0 if self._under_way else self._transfer.least_upload()
                at_once = parts_at_once(
                    self._transfer, transfers.budget - transfers.held, copies, least
                )
                self._under_way += 1
            held = copies * (at_once + 1) * PART_BYTES
            transfers.hold(held)
        try:
            yield at_once
        finally:
            transfers.hold(-held)
            with self._lock:
                self._under_way -= bool(copies)


class UploadBlocks:
    """The blocks of an upload. Remembers the error that ended them, since a driver may wrap it in one of its own."""

    def __init__(self, rest: Iterator[Buffer], first: Buffer | None = None) -> None:
        self.error: BaseException | None = None
        self._first = first
        self._rest = rest

    def __iter__(self) -> UploadBlocks:
        return self

    def __next__(self) -> Buffer:
        if self._first is not None:
            first, self._first = self._first, None
            return first
        try:
            return next(self._rest)
        except StopIteration:
            raise
        except BaseException as error:
            self.error = error
            raise


def blocks_of(parts: Iterable[Buffer], size: int) -> Iterator[memoryview]:
    """The same bytes in new buffers of ``size`` (the last one may be shorter): a part is reused by its maker.

    Large buffers are pages of the system, which go back to it at once. The C library would keep many of them for later.
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


def creates_at_once(transfer: Transfer) -> int:
    """How many objects are created at the same time while others are read, where that costs no memory."""
    return max(1, transfer.connections * 3 // 8)


def parts_at_once(transfer: Transfer, free: int, copies: int = 1, least: int | None = None) -> int:
    """How many parts of an upload are under way at the same time, beside the one that is being made.

    Args:
        transfer: The store's settings.
        free: Bytes of the budget that nobody uses.
        copies: How often a part is held meanwhile.
        least: Bytes that it may hold however few are free; if left out, those of the only upload.
    """
    least = transfer.least_upload() if least is None else least
    fitting = max(free, least) // (copies * PART_BYTES) - 1
    return max(1, min(fitting, transfer.connections))

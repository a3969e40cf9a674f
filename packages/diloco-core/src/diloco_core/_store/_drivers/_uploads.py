"""Uploads in parts: their blocks, and how many of them are sent at once in limited memory."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import xxhash

from .._api import Buffer
from .._transfer import PART_BYTES, Transfer
from ._blocks import Transfers, new_buffer

MOST_PARTS = 10_000
"""The most parts of one upload that S3 accepts (https://docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html)."""

_SMALL = 2**16


class Uploads:
    """Shares the budget of a store between its uploads. Thread-safe.

    Args:
        transfer: The store's settings.
        transfers: Holds the budget, from which reads take memory, too.
    """

    def __init__(self, transfer: Transfer, transfers: Transfers) -> None:
        self._transfer = transfer
        self._transfers = transfers
        self._lock = threading.Lock()
        self._under_way = 0  # number of uploads that hold copies of their parts

    @contextmanager
    def room(self, copies: int) -> Iterator[int]:
        """Take memory for one upload from the budget.

        The context is how many of its parts may be under way at once.

        Args:
            copies: How often a part is held in memory; 0 if it is sent without a copy.
        """
        transfers, at_once = self._transfers, self._transfer.connections
        with self._lock:
            if copies:
                # Only one upload at a time may have memory beyond the budget: with several it would
                # add up.
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


class UploadBlocks(Iterator[Any]):
    """The blocks of an upload.

    If making them fails, the error is remembered, since a driver may wrap it in its own.
    """

    def __init__(self, blocks: Iterator[Buffer], first: Buffer | None = None) -> None:
        self.error: BaseException | None = None
        self._first = first
        self._blocks = blocks

    def __next__(self) -> Buffer:
        if self._first is not None:
            first, self._first = self._first, None
            return first
        try:
            return next(self._blocks)
        except StopIteration:
            raise
        except BaseException as error:
            self.error = error
            raise


class Sent(Iterator[Any]):
    """The blocks of an upload, with their size and digest.

    These show later whether the blocks arrived.

    Attributes:
        size: Bytes so far.
        all: Whether that was all.
    """

    def __init__(self, blocks: Iterator[Buffer]) -> None:
        self.size = 0
        self.all = False
        self._blocks = blocks
        self._digest = xxhash.xxh3_128()

    def __next__(self) -> Buffer:
        try:
            block = next(self._blocks)
        except StopIteration:
            self.all = True
            raise
        self.size += len(block)
        self._digest.update(block)
        return block

    def is_same(self, blocks: Iterable[Buffer]) -> bool:
        """Say whether these blocks have the same bytes."""
        digest, size = xxhash.xxh3_128(), 0
        for block in blocks:
            size += len(block)
            digest.update(block)
        return size == self.size and digest.digest() == self._digest.digest()


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


def creates_at_once(transfer: Transfer) -> int:
    """Return how many objects are created at the same time while others are read.

    This is for drivers that need no memory for that.
    """
    return max(1, transfer.connections * 3 // 8)


def parts_at_once(transfer: Transfer, free: int, copies: int = 1, least: int | None = None) -> int:
    """Return how many parts of an upload are under way at the same time.

    The one that is being made does not count.

    Args:
        transfer: The store's settings.
        free: Bytes of the budget that are not in use.
        copies: How often a part is held in memory.
        least: Bytes that the upload may hold even if fewer are free; if left out, those of an
            upload that is alone.
    """
    least = transfer.least_upload() if least is None else least
    fitting = max(free, least) // (copies * PART_BYTES) - 1
    return max(1, min(fitting, transfer.connections))

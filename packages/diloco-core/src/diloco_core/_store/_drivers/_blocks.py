"""Ranged reads over a network: in the order of use, several at a time, in limited memory.

All readers of a store share one queue and one budget. Readers announce what they are going to read,
range by range, in the order of use, across all objects. So it makes no difference to speed whether
a gigabyte comes from one object or from a thousand: there are always as many requests under way as
the budget allows, and the range that is needed next is fetched first.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import InitVar, dataclass
from functools import partial
from typing import TypeVar

from ..._errors import CorruptedObjectError, StoreUnavailableError
from .._api import Buffer, ObjectReader
from .._transfer import PART_BYTES, Transfer, creates_at_once, parts_at_once

T = TypeVar("T")

HEAD_BYTES = 64 * 2**10
"""Bytes read when an object of unknown size is opened: small objects need no second request."""


@dataclass(slots=True, eq=False)
class Range:
    """Bytes ``start`` to ``stop`` of an object, which a reader is going to read."""

    fetch: Callable[[int, int], Buffer]
    start: int
    stop: int
    future: Future[Buffer] | None = None

    @property
    def size(self) -> int:
        """Number of bytes."""
        return self.stop - self.start


def threads(connections: int) -> Executor:
    """Threads for requests in the background."""
    return ThreadPoolExecutor(connections, "diloco-transfer")


class Transfers:
    """A store's requests in the background, and the queue of the ranges that its readers will read.

    Thread-safe.

    Args:
        settings: How many requests at a time, and in how much memory.
        background: Given a number of connections, makes the executor that sends the requests;
            replaced in simulations.
        uri: The store's URI, for errors.
        copies: Copies of a part that the driver holds while it sends the part.

    Attributes:
        settings: As given.
        block_bytes: The most bytes that one request reads.
        budget: Bytes of announced ranges that may be held or under way; may be set at any time.
    """

    def __init__(
        self, settings: Transfer, background: Callable[[int], Executor], uri: str, copies: int
    ) -> None:
        self._uri = uri
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._background = partial(background, settings.connections)
        self._executor: Executor | None = None
        self._queue: deque[Range] = deque()
        self._dropped: set[Range] = set()
        self._held = 0
        self._uploads = 0  # number of those under way that hold copies of their parts
        self._copies = copies
        self.settings = settings
        self.block_bytes = settings.block_bytes
        self.budget = settings.budget_bytes

    def submit(self, act: Callable[[], T]) -> Future[T]:
        """Call ``act`` in the background; it must not wait for anything else that is done there."""
        self.check_process()
        with self._lock:
            return self._submit(act)

    @property
    def creates_at_once(self) -> int:
        """Objects to be created at once at most; see :attr:`._api.InBackground.creates_at_once`."""
        if self._copies:
            return max(1, self.budget // self.settings.least_upload())
        return creates_at_once(self.settings)

    def check_process(self) -> None:
        """Refuse to send requests from a forked process, where they would never end.

        Threads and connections do not work there.

        Raises:
            StoreUnavailableError: The store was opened by the process that this one was forked
                from.
        """
        if not self.is_own_process():
            raise StoreUnavailableError(
                f"{self._uri} was opened in another process ({self._process}), from which this "
                f"one ({os.getpid()}) was forked: threads and connections do not work after a "
                "fork. Connect after forking, or start processes by spawn "
                "(multiprocessing.set_start_method('spawn')).",
                lasting=True,
            )

    def is_own_process(self) -> bool:
        """Say whether this is still the process that the store was opened in."""
        return os.getpid() == self._process

    def announce(self, wanted: Range) -> None:
        """Announce that this range will be read after all that any reader has announced before."""
        self.check_process()
        with self._lock:
            self._queue.append(wanted)
            self._start_next()

    def take(self, wanted: Range) -> Buffer:
        """The bytes of an announced range. If it is still in the queue, it is fetched at once."""
        self.check_process()
        with self._lock:
            future = wanted.future
            if future is None:
                # The ranges are read in another order than was announced. Waiting for this one's
                # turn could last for ever, since the ranges ahead of it in the queue keep their
                # memory until they are read.
                self._dropped.add(wanted)
                future = self._start(wanted)
        try:
            return future.result()
        except CancelledError:  # the threads were ended in the meantime
            return wanted.fetch(wanted.start, wanted.stop)

    def drop(self, ranges: list[Range]) -> None:
        """Give back the memory of ranges that have been read, or will not be."""
        if not self.is_own_process():
            return
        with self._lock:
            futures = []
            for wanted in ranges:
                if wanted.future is None:
                    self._dropped.add(wanted)
                elif wanted.future.cancel() or wanted.future.done():
                    self._held -= wanted.size
                else:
                    futures.append((wanted.future, wanted.size))
            self._start_next()
        for future, size in futures:  # their requests are under way and cannot be stopped
            future.add_done_callback(lambda _, size=size: self.hold(-size))  # type: ignore[misc]

    def hold(self, size: int) -> None:
        """Take so many bytes from the budget for another use; a negative number gives them back."""
        with self._lock:
            self._held += size
            self._start_next()

    @contextmanager
    def room(self, copies: int) -> Iterator[int]:
        """Take memory for one upload from the budget, which reads share.

        The context is how many of its parts may be under way at once.

        Args:
            copies: How often a part is held in memory; 0 if it is sent without a copy.
        """
        at_once = self.settings.connections
        with self._lock:
            if copies:
                # Only one upload at a time may have memory beyond the budget: with several it would
                # add up.
                least = 0 if self._uploads else self.settings.least_upload()
                at_once = parts_at_once(self.settings, self.budget - self._held, copies, least)
                self._uploads += 1
            size = copies * (at_once + 1) * PART_BYTES
            self._held += size
        try:
            yield at_once
        finally:
            with self._lock:
                self._uploads -= bool(copies)
            self.hold(-size)

    @property
    def held(self) -> int:
        """Bytes of the budget that are in use."""
        with self._lock:
            return self._held

    def close(self) -> None:
        """End each thread as soon as its present request is done; repeatable."""
        with self._lock:
            executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(wait=False, cancel_futures=True)

    def _start_next(self) -> None:
        """Start to fetch the next ranges of the queue, as far as the budget allows."""
        while self._queue:
            head = self._queue[0]
            if head not in self._dropped:
                if self._held and self._held + head.size > self.budget:
                    return
                self._start(head)
            self._queue.popleft()
            self._dropped.discard(head)

    def _start(self, wanted: Range) -> Future[Buffer]:
        self._held += wanted.size
        future = wanted.future = self._submit(lambda: wanted.fetch(wanted.start, wanted.stop))
        return future

    def _submit(self, act: Callable[[], T]) -> Future[T]:
        if self._executor is None:
            self._executor = self._background()
        return self._executor.submit(act)


@dataclass(eq=False)
class BlockReader(ObjectReader):
    """Reads an object in ranges; see :class:`._api.ObjectReader`. Not thread-safe.

    Ranges that :meth:`expect` announces are fetched before they are read; all others when they are
    read.

    Args:
        fetch: Fetches the bytes from ``start`` to ``stop``.
        size: The object's size in bytes.
        head: The first bytes of the object that are already known; may be empty.
        name: What the object is called in errors.
        transfers: The store's requests in the background.
    """

    fetch: Callable[[int, int], Buffer]
    size: int
    head: InitVar[Buffer]
    name: str
    transfers: Transfers

    def __post_init__(self, head: Buffer) -> None:
        self._head = memoryview(head)
        self._expected: deque[Range] = deque()
        # The block that is being read: its offset in the object, its bytes, and how many of them
        # have not been read yet.
        self._block_start, self._block, self._unread = 0, memoryview(b""), 0
        self._current: Range | None = None

    def expect(self, start: int, stop: int) -> None:
        """Fetch these bytes in the background; see :meth:`._api.ObjectReader.expect`."""
        stop = min(stop, self.size)
        # The head is already here.
        start = max(start, len(self._head)) if stop > len(self._head) else stop
        if start >= stop or self._is_expected(start, stop):
            return
        block_bytes = self.transfers.block_bytes
        for block_start in range(start, stop, block_bytes):
            wanted = Range(self.fetch, block_start, min(block_start + block_bytes, stop))
            self._expected.append(wanted)
            self.transfers.announce(wanted)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from ``offset``; see :meth:`._api.ObjectReader.read_into`."""
        end = offset + len(buffer)
        if end > self.size:
            raise CorruptedObjectError(
                f"{self.name} is truncated: it has {self.size} bytes, and bytes {offset} to {end} "
                "are needed"
            )
        while offset < end:
            into = buffer[len(buffer) - (end - offset) :]
            if offset < len(self._head):
                offset += _copy(self._head, offset, into)
                continue
            if not 0 <= offset - self._block_start < len(self._block):
                self._turn_to(offset, end)
            # No local variable for the block: it would keep the block in memory while the next one
            # is waited for.
            count = _copy(self._block, offset - self._block_start, into)
            offset += count
            self._unread -= count
            if self._unread <= 0:  # nothing is read twice, except after errors
                self._release_block()

    def close(self) -> None:
        """Release the blocks; repeatable."""
        self._release_block()
        self.transfers.drop(list(self._expected))
        self._expected.clear()

    def _is_expected(self, start: int, stop: int) -> bool:
        """Say whether all of these bytes were announced already, and not read since."""
        if self._block and self._block_start <= start < self._block_start + len(self._block):
            start = self._block_start + len(self._block)
        for wanted in self._expected:
            if wanted.start <= start < wanted.stop:
                start = wanted.stop
        return start >= stop

    def _turn_to(self, offset: int, end: int) -> None:
        """Make the block that holds ``offset`` the current one."""
        self._release_block()  # before the next one arrives, so that there is one less in memory
        if any(wanted.start <= offset < wanted.stop for wanted in self._expected):
            while not self._expected[0].start <= offset < self._expected[0].stop:
                # These ranges were announced, and are not read.
                self.transfers.drop([self._expected.popleft()])
            self._current = self._expected.popleft()
            block_start, block = self._current.start, self.transfers.take(self._current)
        else:
            stop = min(
                self.size, max(min(end, offset + self.transfers.block_bytes), offset + HEAD_BYTES)
            )
            block_start, block = offset, self.fetch(offset, stop)
        self._block_start, self._block = block_start, memoryview(block)
        self._unread = len(self._block)

    def _release_block(self) -> None:
        self._block_start, self._block, self._unread = 0, memoryview(b""), 0
        current, self._current = self._current, None
        if current is not None:
            self.transfers.drop([current])
            current.future = None


def _copy(block: memoryview, start: int, into: memoryview) -> int:
    """Copy the bytes of a block from ``start`` on, as many as fit; returns how many that were."""
    part = block[start : start + len(into)]
    into[: len(part)] = part
    return len(part)


def new_buffer(size: int) -> memoryview:
    """Return memory mapped from the system, which goes back to it as soon as it is not used."""
    return memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))

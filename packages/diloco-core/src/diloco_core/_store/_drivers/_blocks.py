"""Ranged reads over a network: fetched in the order in which they will be used, several at a time, and in bounded memory.

All readers of a store share one queue and one budget. Whoever is going to read says so beforehand, range by range in the
order of use, over as many objects as there are. So it makes no difference to speed whether a gigabyte comes from one object
or from a thousand: there are always as many requests under way as the budget allows, and the next one to be used is first.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import deque
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Self, TypeVar

from ..._errors import CorruptedObjectError, StoreUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor
    from types import TracebackType

    from .._api import Buffer
    from .._transfer import Transfer

T = TypeVar("T")

HEAD_BYTES = 64 * 2**10
"""What is read when an object of unknown size is opened: small objects need no second request."""


class Range:
    """Bytes ``start`` to ``stop`` of an object that somebody is going to read."""

    __slots__ = ("fetch", "future", "start", "stop")

    def __init__(self, fetch: Callable[[int, int], Buffer], start: int, stop: int) -> None:
        self.fetch = fetch
        self.start = start
        self.stop = stop
        self.future: Future[Buffer] | None = None

    @property
    def size(self) -> int:
        """Its bytes."""
        return self.stop - self.start


def threads(connections: int) -> Executor:
    """Threads for requests in the background."""
    return ThreadPoolExecutor(connections, "diloco-transfer")


class Transfers:
    """A store's requests in the background, and the queue of what its readers will read. Thread-safe.

    Args:
        settings: How many of them, and in how much memory.
        background: Makes what sends these requests, so many at a time; injected in simulations.
        uri: The store, for errors.

    Attributes:
        block_bytes: Most bytes that one request reads.
        budget: Bytes of announced ranges that are held or on their way; it may be set at any time.
    """

    def __init__(
        self, settings: Transfer, background: Callable[[int], Executor] = threads, uri: str = ""
    ) -> None:
        self._uri = uri
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._background = partial(background, settings.connections)
        self._executor: Executor | None = None
        self._queue: deque[Range] = deque()
        self._dropped: set[Range] = set()
        self._held = 0
        self.block_bytes = settings.block_bytes
        self.budget = settings.budget_bytes

    def submit(self, act: Callable[[], T]) -> Future[T]:
        """Do something in the background; it must not wait for anything else that is done there."""
        self.check_process()
        with self._lock:
            return self._submit(act)

    def check_process(self) -> None:
        """Refuse what would never end: of threads and connections, a forked process has only what looks like them.

        Raises:
            StoreUnavailableError: The store was opened by the process that this one was forked from.
        """
        if not self.is_own_process():
            raise StoreUnavailableError(
                f"{self._uri} was opened in another process ({self._process}), from which this one ({os.getpid()}) was "
                "forked: threads and connections do not outlive that. Connect after forking, or start processes by spawn "
                "(multiprocessing.set_start_method('spawn')).",
                lasting=True,
            )

    def is_own_process(self) -> bool:
        """Whether this is still the process that the store was opened in."""
        return os.getpid() == self._process

    def announce(self, wanted: Range) -> None:
        """This range will be read after all that were announced before it, by whichever reader."""
        self.check_process()
        with self._lock:
            self._queue.append(wanted)
            self._go_on()

    def take(self, wanted: Range) -> Buffer:
        """The bytes of an announced range, which is fetched at once where its turn had not come yet."""
        self.check_process()
        with self._lock:
            future = wanted.future
            if future is None:
                # Somebody reads in another order than was said. To wait for the turn might be to wait for ever: what is
                # ahead in the queue keeps its memory until it is read.
                self._dropped.add(wanted)
                future = self._start(wanted)
        try:
            return future.result()
        except CancelledError:  # the threads were ended in the meantime
            return wanted.fetch(wanted.start, wanted.stop)

    def drop(self, ranges: list[Range]) -> None:
        """These ranges are read, or will not be: their memory is free for the next ones."""
        if not self.is_own_process():
            return
        with self._lock:
            futures = []
            for each in ranges:
                if each.future is None:
                    self._dropped.add(each)
                elif each.future.cancel() or each.future.done():
                    self._held -= each.size
                else:
                    futures.append((each.future, each.size))
            self._go_on()
        for future, size in futures:  # it is on its way and cannot be stopped
            future.add_done_callback(lambda _, size=size: self._release(size))  # type: ignore[misc]

    def hold(self, size: int) -> None:
        """So many bytes are taken from the budget by something else, or given back where it is negative."""
        self._release(-size)

    @property
    def held(self) -> int:
        """Bytes of the budget that are in use."""
        with self._lock:
            return self._held

    def close(self) -> None:
        """End the threads as soon as the requests that they are at are done; repeatable."""
        with self._lock:
            executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(wait=False, cancel_futures=True)

    def _release(self, size: int) -> None:
        with self._lock:
            self._held -= size
            self._go_on()

    def _go_on(self) -> None:
        while self._queue:
            following = self._queue[0]
            if following not in self._dropped:
                if self._held and self._held + following.size > self.budget:
                    return
                self._start(following)
            self._queue.popleft()
            self._dropped.discard(following)

    def _start(self, wanted: Range) -> Future[Buffer]:
        self._held += wanted.size
        future = wanted.future = self._submit(lambda: wanted.fetch(wanted.start, wanted.stop))
        return future

    def _submit(self, act: Callable[[], T]) -> Future[T]:
        if self._executor is None:
            self._executor = self._background()
        return self._executor.submit(act)


class BlockReader:
    """An object that is fetched in ranges; see :class:`._api.ObjectReader`. Not thread-safe.

    What :meth:`expect` announces is fetched ahead of the reader; anything else is fetched when it is asked for.

    Args:
        fetch: Gets the bytes from ``start`` to ``stop``.
        size: The object's size in bytes.
        head: Its first bytes, as far as they are known.
        name: What it is called in errors.
        transfers: The store's threads.
    """

    def __init__(
        self,
        fetch: Callable[[int, int], Buffer],
        size: int,
        head: Buffer,
        name: str,
        transfers: Transfers,
    ) -> None:
        self.size = size
        self._fetch = fetch
        self._name = name
        self._transfers = transfers
        self._head = memoryview(head)
        self._expected: deque[Range] = deque()
        # The block that is being read: where it begins, its bytes, and how many of them were not asked for yet.
        self._at, self._block, self._unread = 0, memoryview(b""), 0
        self._current: Range | None = None

    def expect(self, start: int, stop: int) -> None:
        """Fetch from ``start`` to ``stop`` in the background; see :class:`._api.ReadsAhead`."""
        stop = min(stop, self.size)
        start = (
            max(start, len(self._head)) if stop > len(self._head) else stop
        )  # as far as it is here already
        if start >= stop or self._is_expected(start, stop):
            return
        block_bytes = self._transfers.block_bytes
        for begin in range(start, stop, block_bytes):
            wanted = Range(self._fetch, begin, min(begin + block_bytes, stop))
            self._expected.append(wanted)
            self._transfers.announce(wanted)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from ``offset``; see :meth:`._api.ObjectReader.read_into`."""
        end = offset + len(buffer)
        if end > self.size:
            raise CorruptedObjectError(
                f"{self._name} is truncated: it has {self.size} bytes, and bytes {offset} to {end} were asked for"
            )
        while offset < end:
            into = buffer[len(buffer) - (end - offset) :]
            if offset < len(self._head):
                offset += _copy(self._head, offset, into)
                continue
            if not 0 <= offset - self._at < len(self._block):
                self._turn_to(offset, end)
            # No name for the block here: it would be held while the next one is waited for.
            count = _copy(self._block, offset - self._at, into)
            offset += count
            self._unread -= count
            if self._unread <= 0:  # nobody reads anything twice, but for errors
                self._let_go()

    def close(self) -> None:
        """Let go of the blocks; repeatable."""
        self._let_go()
        self._transfers.drop(list(self._expected))
        self._expected.clear()

    def _is_expected(self, start: int, stop: int) -> bool:
        """Whether all of this was announced already, and not read since."""
        if self._block and self._at <= start < self._at + len(self._block):
            start = self._at + len(self._block)
        for each in self._expected:
            if each.start <= start < each.stop:
                start = each.stop
        return start >= stop

    def _turn_to(self, offset: int, end: int) -> None:
        """Make a block current that holds ``offset``."""
        self._let_go()  # before the next one comes, so that there is one less in memory
        if any(each.start <= offset < each.stop for each in self._expected):
            while not self._expected[0].start <= offset < self._expected[0].stop:
                self._transfers.drop([self._expected.popleft()])  # passed over
            self._current = self._expected.popleft()
            at, block = self._current.start, self._transfers.take(self._current)
        else:
            stop = min(
                self.size, max(min(end, offset + self._transfers.block_bytes), offset + HEAD_BYTES)
            )
            at, block = offset, self._fetch(offset, stop)
        self._at, self._block = at, memoryview(block)
        self._unread = len(self._block)

    def _let_go(self) -> None:
        self._at, self._block, self._unread = 0, memoryview(b""), 0
        current, self._current = self._current, None
        if current is not None:
            self._transfers.drop([current])
            current.future = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _copy(block: memoryview, start: int, into: memoryview) -> int:
    """Copy what a block has from ``start`` on, as far as there is room; returns how many bytes that were."""
    part = block[start : start + len(into)]
    into[: len(part)] = part
    return len(part)


def new_buffer(size: int) -> memoryview:
    """Memory of its own, which goes back to the system as soon as nobody uses it."""
    return memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))

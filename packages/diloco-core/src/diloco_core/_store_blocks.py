"""Ranged reads over a network: ahead of the reader, several at a time, and in bounded memory."""

from __future__ import annotations

import os
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Self, TypeVar

from ._errors import CorruptedObjectError, StoreUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor
    from types import TracebackType

    from ._store import Buffer

T = TypeVar("T")

BLOCK_BYTES = 8 * 2**20
"""Largest range that is asked for at once: large enough to hide the latency of a request."""
HEAD_BYTES = 64 * 2**10
"""What is read when an object is opened: small objects need no second request."""

_SMALLEST_BLOCK = 256 * 2**10
_CONNECTIONS = 16
# Four blocks of 7 MiB under way while a fifth is used: as quick as a bare client, within the bars of bench-s3 for memory.
_BUDGET = 36 * 2**20
_MOST_AHEAD = 4


def threads() -> Executor:
    """Threads for requests in the background."""
    return ThreadPoolExecutor(_CONNECTIONS, "diloco-transfer")


class Transfers:
    """A store's requests in the background, and the memory that its open readers share. Thread-safe.

    Args:
        background: Makes what sends these requests; injected in simulations.
        uri: The store, for errors.
    """

    def __init__(self, background: Callable[[], Executor] = threads, uri: str = "") -> None:
        self._uri = uri
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._background = background
        self._executor: Executor | None = None
        self._readers = 0

    def submit(self, act: Callable[[], T]) -> Future[T]:
        """Do something in the background; it must not wait for anything else that is done there."""
        self.check_process()
        with self._lock:
            if self._executor is None:
                self._executor = self._background()
            return self._executor.submit(act)

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

    def count(self, change: int) -> None:
        """A reader was opened (1) or closed (-1)."""
        with self._lock:
            self._readers += change

    def share(self) -> tuple[int, int]:
        """Size of a block in bytes, and how many of them one reader may have under way, so that all fit the budget.

        With so many readers that not even two of the smallest blocks fit, each still gets those.
        """
        with self._lock:
            own = _BUDGET // max(1, self._readers)
        block = min(max(own // (_MOST_AHEAD + 1), _SMALLEST_BLOCK), BLOCK_BYTES)
        return block, min(max(own // block - 1, 1), _MOST_AHEAD)

    def close(self) -> None:
        """End the threads as soon as the requests that they are at are done; repeatable."""
        with self._lock:
            executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(wait=False, cancel_futures=True)


class BlockReader:
    """An object that is fetched in ranges; see :class:`._store.ObjectReader`. Not thread-safe.

    What :meth:`expect` announces is fetched ahead of the reader; anything else is fetched when it is asked for.

    Args:
        fetch: Gets the bytes from ``start`` to ``stop``.
        size: The object's size in bytes.
        head: Its first bytes, as far as they are known.
        name: What it is called in errors.
        transfers: The store's threads.
    """

    def __init__(
        self, fetch: Callable[[int, int], Buffer], size: int, head: Buffer, name: str, transfers: Transfers
    ) -> None:
        self.size = size
        self._fetch = fetch
        self._name = name
        self._transfers = transfers
        self._at, self._block = 0, memoryview(head)
        self._next = self._stop = 0
        self._block_bytes, self._most = 0, 0
        self._ahead: deque[tuple[int, Future[Buffer]]] = deque()
        self._expected: tuple[int, int] | None = None
        self._open = True
        transfers.count(1)

    def expect(self, start: int, stop: int) -> None:
        """Fetch from ``start`` to ``stop`` in the background; see :class:`._store.ReadsAhead`."""
        if (start, stop) == self._expected:
            return  # it was said before, and nothing of it was read yet
        self._forget()
        self._expected = start, stop
        here = self._at + len(self._block)
        if self._at <= start < here:
            start = here  # as far as it is here already
        self._block_bytes, self._most = self._transfers.share()
        self._next, self._stop = start, min(stop, self.size)
        self._go_ahead()

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from ``offset``; see :meth:`._store.ObjectReader.read_into`."""
        end = offset + len(buffer)
        if end > self.size:
            raise CorruptedObjectError(
                f"{self._name} is truncated: it has {self.size} bytes, and bytes {offset} to {end} were asked for"
            )
        while offset < end:
            inside = offset - self._at
            if not 0 <= inside < len(self._block):
                self._turn_to(offset, end)
                inside = offset - self._at
            part = self._block[inside : inside + end - offset]
            start = len(buffer) - (end - offset)
            buffer[start : start + len(part)] = part
            offset += len(part)

    def close(self) -> None:
        """Let go of the blocks; repeatable."""
        self._forget()
        self._block = memoryview(b"")
        if self._open:
            self._open = False
            self._transfers.count(-1)

    def _turn_to(self, offset: int, end: int) -> None:
        """Make a block current that holds ``offset``."""
        self._expected = None
        self._block = memoryview(b"")  # before the next one comes, so that there is one less in memory
        while self._ahead and self._ahead[0][0] + self._block_bytes <= offset:
            self._ahead.popleft()[1].cancel()  # passed over
        self._transfers.check_process()
        if self._ahead and self._ahead[0][0] <= offset:
            self._at, future = self._ahead.popleft()
            block = future.result()
            del future  # it holds the block
            self._go_ahead()
        else:
            stop = min(self.size, max(min(end, offset + BLOCK_BYTES), offset + HEAD_BYTES))
            self._at, block = offset, self._fetch(offset, stop)
        self._block = memoryview(block)

    def _go_ahead(self) -> None:
        while self._next < self._stop and len(self._ahead) < self._most:
            stop = min(self._stop, self._next + self._block_bytes)
            self._ahead.append((self._next, self._transfers.submit(partial(self._fetch, self._next, stop))))
            self._next = stop

    def _forget(self) -> None:
        for _, future in self._ahead:
            future.cancel()
        self._ahead.clear()
        self._next = self._stop = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

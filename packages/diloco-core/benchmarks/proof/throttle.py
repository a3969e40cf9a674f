"""A slow link to a store: a token bucket for each direction, and a latency for each request.

:class:`ThrottledStore` stands in front of a folder, :class:`ThrottledEndpoint` in front of a store
that speaks HTTP, such as S3. Each replica has a :class:`Link` of its own.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from diloco_core._store._api import RECORD_BYTES, ObjectReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from diloco_core._store._api import Buffer, Store

BURST = 0.01
"""So many seconds' bytes an idle link may carry at once.

They make up for a process that wakes up late.
"""

_PIECE = 2**16  # bytes that the endpoint passes on at a time


class TokenBucket:
    """One direction of a link.

    In any time t it carries at most ``rate * t + burst`` bytes, and as many if asked. Thread-safe.

    Args:
        rate: Bytes per second.
        burst: Bytes that it may carry at once after a pause.
        clock: A monotonic clock in seconds.
        sleep: Waits for a number of seconds.

    Attributes:
        bytes: How many it has carried.
    """

    def __init__(
        self,
        rate: float,
        burst: float = 0.0,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        if not rate > 0 or not burst >= 0:
            raise ValueError(
                f"rate must be above 0 and burst at least 0, not {rate!r} and {burst!r} (in "
                "bytes): nothing would pass"
            )
        self.bytes = 0
        self._rate = rate
        self._burst = burst
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._due = -float("inf")  # when everything so far will have passed

    def take(self, size: int) -> None:
        """Wait until so many bytes have passed. Those who wait take their turns."""
        with self._lock:
            self.bytes += size
            now = self._clock()
            self._due = max(self._due, now - self._burst / self._rate) + size / self._rate
            wait = self._due - now
        if wait > 0:
            self._sleep(wait)


class Link:
    """The link of one replica. Thread-safe.

    Args:
        bandwidth: Bytes per second in each direction.
        latency: Seconds that a request takes besides its bytes.
        clock: A monotonic clock in seconds.
        sleep: Waits for a number of seconds.

    Attributes:
        up: The direction to the store.
        down: The direction from it.
    """

    def __init__(
        self,
        bandwidth: float,
        latency: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self.up, self.down = (
            TokenBucket(bandwidth, BURST * bandwidth, clock=clock, sleep=sleep) for _ in range(2)
        )
        self._latency = latency
        self._sleep = sleep

    def ask(self) -> None:
        """Wait as long as a request takes besides its bytes."""
        self._sleep(self._latency)


class ThrottledStore:
    """A store at the other end of a link; see :class:`diloco_core._store._api.Store`.

    As thread-safe as that store.

    Every operation costs the latency of a request, and the bytes of objects pass through the link,
    one request at a time. Keys and the answers to listings cost no bytes.

    Args:
        store: The store, which keeps what it says of itself except that it is not near any more.
        link: The link of the replica.
    """

    near = False

    def __init__(self, store: Store, link: Link) -> None:
        self.link = link
        self.patience = store.patience
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def put(self, key: str, parts: Iterable[Buffer]) -> int:
        """Write an object through the link."""
        self.link.ask()
        return self._store.put(key, self._sent(parts))

    def create(self, key: str, data: bytes | Iterable[Buffer]) -> bool:
        """Write an object through the link, unless the key exists."""
        self.link.ask()
        if isinstance(data, bytes):
            self.link.up.take(len(data))
            return self._store.create(key, data)
        return self._store.create(key, self._sent(data))

    def get(self, key: str, largest: int = RECORD_BYTES) -> bytes:
        """Read a small object through the link."""
        self.link.ask()
        data = self._store.get(key, largest)
        self.link.down.take(len(data))
        return data

    def open(self, key: str, size: int | None = None) -> ThrottledReader:
        """Open an object at the other end.

        That is a request of its own, unless its size is known.
        """
        if size is None:
            self.link.ask()
        return ThrottledReader(self._store.open(key, size), self.link)

    def list(self, prefix: str) -> dict[str, int]:
        """Keys and sizes, after the latency of a request."""
        self.link.ask()
        return self._store.list(prefix)

    def delete(self, keys: Iterable[str], *, unread: bool = False) -> None:
        """Delete objects, after the latency of a request."""
        self.link.ask()
        self._store.delete(keys, unread=unread)

    def _sent(self, parts: Iterable[Buffer]) -> Iterator[Buffer]:
        for part in parts:
            self.link.up.take(memoryview(part).nbytes)
            yield part


class ThrottledReader(ObjectReader):
    """An open object at the other end of a link.

    A read that begins where the one before has ended belongs to its request.
    """

    def __init__(self, reader: ObjectReader, link: Link) -> None:
        self.size = reader.size
        self._reader = reader
        self._link = link
        self._end = -1

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill a buffer through the link."""
        if offset != self._end:
            self._link.ask()
        self._link.down.take(buffer.nbytes)
        self._reader.read_into(offset, buffer)
        self._end = offset + buffer.nbytes

    def close(self) -> None:
        """Release the object."""
        self._reader.close()


class ThrottledEndpoint:
    """A server on a loopback port that passes on what it is sent, through a link.

    Made for HTTP: a client asks and is answered.

    All bytes count, headers too. ``with ThrottledEndpoint(url, link) as endpoint`` starts and stops
    it; use ``endpoint.url`` in the place of ``url``.

    Args:
        url: The server to which everything goes, such as ``http://127.0.0.1:9000``.
        link: The link of the replica. All connections share it.
    """

    def __init__(self, url: str, link: Link) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or parts.hostname is None:
            raise ValueError(
                f"{url!r} cannot be throttled: what is encrypted cannot be told apart; give an "
                "http:// address"
            )
        self._target = parts.hostname, parts.port or 80
        self._link = link
        self._clients: set[socket.socket] = set()
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            for each in [self._listener, *self._clients]:
                with contextlib.suppress(OSError):  # it has ended by itself
                    each.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the listener was closed
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._connect, args=(client,), daemon=True).start()

    def _connect(self, client: socket.socket) -> None:
        """Pass on what comes from both sides, and close both when both have ended."""
        with (
            contextlib.suppress(OSError),  # nobody answers there
            client,
            socket.create_connection(self._target) as server,
        ):
            for each in (client, server):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._clients.add(client)
            answered = threading.Event()
            answered.set()
            back = threading.Thread(
                target=self._pass_on, args=(server, client, answered, False), daemon=True
            )
            back.start()
            self._pass_on(client, server, answered, True)
            back.join()
            with self._lock:
                self._clients.remove(client)

    def _pass_on(
        self, source: socket.socket, target: socket.socket, answered: threading.Event, asks: bool
    ) -> None:
        """Pass on what comes from one side.

        The first bytes after an answer are a new request, which costs the latency.
        """
        bucket = self._link.up if asks else self._link.down
        with contextlib.suppress(OSError):  # one side has closed the connection
            while data := source.recv(_PIECE):
                if not asks:
                    answered.set()
                elif answered.is_set():
                    answered.clear()
                    self._link.ask()
                bucket.take(len(data))
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

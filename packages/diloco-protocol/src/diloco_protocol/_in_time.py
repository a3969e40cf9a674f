"""Deadlines for whole answers over HTTP, however slowly they arrive.

urllib3 limits the pause between two pieces of an answer, but not the number of pieces.
"""

from __future__ import annotations

import io
import math
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from socket import socket

_TOO_SLOW = "the answer comes too slowly, and is not read to its end"


class _Reader(io.RawIOBase):
    """The stream that a connection receives, up to a deadline."""

    def __init__(self, received: io.RawIOBase, sock: socket, up: float) -> None:
        self._received = received
        self._socket = sock
        self._pause = sock.gettimeout()  # urllib3 has set it
        self.up = up

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int | None:
        left = self.up - time.monotonic()
        if left <= 0:
            raise OSError(_TOO_SLOW)
        if left >= (math.inf if self._pause is None else self._pause):
            return self._received.readinto(buffer)
        self._socket.settimeout(left)
        try:
            return self._received.readinto(buffer)
        except TimeoutError as error:
            raise OSError(_TOO_SLOW) from error
        finally:  # the next request may use the same connection
            self._socket.settimeout(self._pause)

    def close(self) -> None:
        self._received.close()
        super().close()


def in_time(
    pool: type[Any], up: Callable[[], float], endless: Callable[[], bool] = lambda: False
) -> type[Any]:
    """Return a class of connection pools whose answers have to be received by a deadline.

    The deadline covers the headers as well. If it passes, reading raises an ``OSError``, which
    urllib3 turns into an error of its own.

    Args:
        pool: urllib3's class of pools, or a client library's subclass of it.
        up: Called when the wait for an answer begins, in the thread that sent the request; returns
            the deadline, as a time of ``time.monotonic``.
        endless: Called in that thread when the headers have arrived; returns whether the body may
            take any time, if the answer is not an error.
    """
    from http.client import HTTPResponse  # slow to import

    class Answer(HTTPResponse):
        def __init__(self, sock: socket, *args: Any, **options: Any) -> None:
            super().__init__(sock, *args, **options)
            self._reader = _Reader(self.fp.detach(), sock, up())
            self.fp = io.BufferedReader(self._reader)

        def begin(self) -> None:
            super().begin()
            if self.status < 300 and endless():
                self._reader.up = math.inf

    connection = type(
        pool.ConnectionCls.__name__, (pool.ConnectionCls,), {"response_class": Answer}
    )
    return type(pool.__name__, (pool,), {"ConnectionCls": connection})

"""Connections of the HTTP server, with limits on their number and on the size of a head."""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import threading
from http.server import ThreadingHTTPServer
from typing import Any

# For a request line and its headers together; a server written in Go takes about as much.
HEAD_BYTES = 1 << 20


class Connections(ThreadingHTTPServer):
    """A server with one thread per connection, and a bounded number of them."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128
    context: ssl.SSLContext | None = None
    idle_seconds = 600.0
    most_connections = 1000

    def __init__(self, *args: Any) -> None:
        self._accepted: set[int] = set()
        self._open: set[socket.socket] = set()
        self._waiting: dict[socket.socket, None] = {}  # no admitted request, longest first
        self._lock = threading.Lock()
        super().__init__(*args)

    def verify_request(self, request: Any, client_address: Any) -> bool:  # noqa: ARG002
        """Return whether there is room for one more connection, closing an idle one if need be."""
        with self._lock:
            if len(self._accepted) >= self.most_connections:
                if not self._waiting:
                    return False
                oldest = next(iter(self._waiting))
                del self._waiting[oldest]
                _cut(oldest)
            self._accepted.add(id(request))
            self._waiting[request] = None
            return True

    def waits(self, connection: socket.socket) -> None:
        """Note that a connection has no admitted request now."""
        with self._lock:
            self._waiting[connection] = None

    def works(self, connection: socket.socket) -> None:
        """Note that a request of a connection was admitted."""
        with self._lock:
            self._waiting.pop(connection, None)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection, however it went."""
        with self._lock:
            self._accepted.discard(id(request))
            self._waiting.pop(request, None)
        super().shutdown_request(request)

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Shake hands in the connection's own thread, so that a slow client blocks no others."""
        request.settimeout(self.idle_seconds)
        with self._lock:
            self._waiting.pop(request, None)
            if self.context is not None:
                try:
                    request = self.context.wrap_socket(
                        request, server_side=True, do_handshake_on_connect=False
                    )
                except OSError:  # the client has gone
                    return
            self._open.add(request)
            self._waiting[request] = None
        try:
            if self.context is not None:
                request.do_handshake()
            super().finish_request(request, client_address)
        except OSError:
            pass  # the client has gone
        finally:
            with self._lock:
                self._open.discard(request)
                self._waiting.pop(request, None)
            if self.context is not None:
                request.close()

    def cut_all(self) -> None:
        """Close every connection."""
        with self._lock:
            for connection in self._open:
                _cut(connection)


def _cut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # closed already
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


class Head:
    """The reading side of a connection, with one limit for all lines of a head."""

    def __init__(self, file: Any) -> None:
        self.left = 0
        self.read1 = file.read1
        self.close = file.close
        self._file = file

    def readline(self, most: int) -> bytes:
        """Read a line of a head.

        Raises:
            HTTPException: the head is too long; it is answered with 431.
        """
        line: bytes = self._file.readline(most)
        self.left -= len(line)
        if self.left < 0:
            raise http.client.HTTPException(f"a head has at most {HEAD_BYTES} bytes")
        return line

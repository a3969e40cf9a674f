"""The HTTP server: keep-alive, answers in one piece or streamed. What a client can make it hold is bounded."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import struct
import threading
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from . import _websocket

Json = dict[str, Any]

# How much of a refused body is thrown away before the connection is closed.
_PASSED_OVER = 4 << 20


@dataclass(frozen=True)
class Request:
    """What a client asks."""

    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    raw_query: str = ""

    def every(self, name: str) -> list[str]:
        """All values of a parameter that is given several times, in their order."""
        pairs = urllib.parse.parse_qsl(self.raw_query, keep_blank_values=True)
        return [value for key, value in pairs if key == name]

    def flag(self, name: str) -> bool:
        """Whether a parameter of the query is true, in any of its usual spellings."""
        return self.query.get(name) in ("1", "t", "T", "true", "TRUE", "True")


@dataclass(frozen=True)
class Response:
    """What it is told.

    Attributes:
        status: of HTTP.
        body: an iterator is sent piece by piece as it comes.
        kind: the content type.
        headers: more of them.
        talk: what goes on instead, if the connection becomes a WebSocket.
    """

    status: int
    body: bytes | Iterator[bytes]
    kind: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)
    talk: _websocket.Talk | None = None


class CutError(Exception):
    """Drop the connection without an answer."""


def as_json(status: int, value: Any, headers: Mapping[str, str] | None = None) -> Response:
    """An answer in JSON."""
    return Response(
        status, json.dumps(value, separators=(",", ":")).encode(), headers=headers or {}
    )


class Server:
    """Listens on loopback from ``start`` to ``stop``.

    Args:
        handle: Answers a request, or raises ``CutError``.
        port: The port; 0 for a free one.
        context: For TLS; None for none.
        admit: Looks at a request before its body is read, and gives the answer if it is refused; the connection is closed then.
            The length of the body is in its headers.
        idle_seconds: After so long without a byte from the client, its connection is closed.
        most_connections: How many may be open; one more is closed at once.
    """

    def __init__(
        self,
        handle: Callable[[Request], Response],
        port: int,
        context: ssl.SSLContext | None,
        *,
        admit: Callable[[Request], Response | None] | None = None,
        idle_seconds: float = 600.0,
        most_connections: int = 1000,
    ) -> None:
        self._inner = _Inner(("127.0.0.1", port), _handler(handle, admit, idle_seconds))
        self._inner.context = context
        self._inner.idle_seconds = idle_seconds
        self._inner.most_connections = most_connections
        self._thread = threading.Thread(
            target=self._inner.serve_forever, args=(0.01,), name="stand-in", daemon=True
        )

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self._inner.server_address[1])

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def stop(self) -> None:
        """Close the port and all connections."""
        self._inner.shutdown()
        self._inner.server_close()
        self._thread.join()
        self._inner.cut_all()


class _Inner(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128
    context: ssl.SSLContext | None = None
    idle_seconds = 600.0
    most_connections = 1000

    def __init__(self, *args: Any) -> None:
        self._open: set[socket.socket] = set()
        self._accepted: set[int] = set()
        self._lock = threading.Lock()
        super().__init__(*args)

    def verify_request(self, request: Any, client_address: Any) -> bool:  # noqa: ARG002
        """Whether there is room for one more connection."""
        with self._lock:
            if len(self._accepted) >= self.most_connections:
                return False
            self._accepted.add(id(request))
            return True

    def shutdown_request(self, request: Any) -> None:
        """Close a connection, however it went."""
        with self._lock:
            self._accepted.discard(id(request))
        super().shutdown_request(request)

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Shake hands in the connection's own thread, so that a slow client holds up nobody."""
        if self.context is not None:
            request.settimeout(self.idle_seconds)
            try:
                request = self.context.wrap_socket(request, server_side=True)
            except (OSError, ssl.SSLError):
                return
        with self._lock:
            self._open.add(request)
        try:
            super().finish_request(request, client_address)
        except (ConnectionError, ssl.SSLError, TimeoutError):
            pass  # the client has gone
        finally:
            with self._lock:
                self._open.discard(request)
            if self.context is not None:
                request.close()

    def cut_all(self) -> None:
        with self._lock:
            for connection in self._open:
                with contextlib.suppress(OSError):  # closed already
                    connection.shutdown(socket.SHUT_RDWR)


def _without_length(head: Request) -> Response | None:
    """The answer to a request of which it is not said how long it is."""
    length = head.headers.get("content-length", "0")
    if "transfer-encoding" in head.headers:
        return Response(411, b"send a Content-Length instead of chunks\n", "text/plain")
    if not (length.isascii() and length.isdecimal() and len(length) < 16):
        return Response(400, b"Content-Length must be a number of bytes\n", "text/plain")
    return None


def _handler(
    handle: Callable[[Request], Response],
    admit: Callable[[Request], Response | None] | None,
    idle_seconds: float,
) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = idle_seconds
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True
        wbufsize = -1  # one packet for head and body

        def handle_expect_100(self) -> bool:
            """Say at once that a body may come, which its sender waits for."""
            go_on = super().handle_expect_100()
            self.wfile.flush()
            return go_on

        def _answer(self) -> None:
            parts = urllib.parse.urlsplit(self.path)
            query = dict(urllib.parse.parse_qsl(parts.query, keep_blank_values=True))
            headers = {key.lower(): value for key, value in self.headers.items()}
            path = urllib.parse.unquote(parts.path)
            head = Request(self.command, path, query, headers, b"", parts.query)
            refused = _without_length(head) or (None if admit is None else admit(head))
            if refused is not None:
                self.close_connection = True
                self._send(refused)
                self._pass_over(head)
                return
            body = self.rfile.read(int(headers.get("content-length", "0")))
            try:
                response = handle(replace(head, body=body))
            except CutError:
                self._cut()
                return
            if response.talk is None:
                self._send(response)
                return
            self.close_connection = True
            self.connection.settimeout(None)  # a command may say nothing for hours
            _websocket.serve(self.connection, self.path, self.headers.items(), response.talk)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = do_HEAD = _answer  # noqa: N815

        def _pass_over(self, head: Request) -> None:
            """Throw away what follows a refused request: a close with bytes unread would reset, and the answer be lost."""
            self.wfile.flush()
            left = _PASSED_OVER
            length = head.headers.get("content-length", "0")
            if length.isascii() and length.isdecimal():
                left = min(left, int(length))
            while left > 0 and (piece := self.rfile.read1(min(left, 65536))):
                left -= len(piece)

        def _send(self, response: Response) -> None:
            self.send_response(response.status)
            self.send_header("Content-Type", response.kind)
            for key, value in response.headers.items():
                self.send_header(key, value)
            if self.close_connection:
                self.send_header("Connection", "close")
            if isinstance(response.body, bytes):
                if (
                    "Content-Length" not in response.headers
                ):  # the answer to a HEAD tells another one than its own
                    self.send_header("Content-Length", str(len(response.body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(response.body)
                return
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.flush()
            try:
                for piece in response.body:
                    if piece:
                        self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                        self.wfile.flush()
                self.wfile.write(b"0\r\n\r\n")
            except CutError:
                self._cut()

        def _cut(self) -> None:
            """Reset, so that the client sees an error and not an end."""
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            self.connection.close()

        def log_message(self, *args: Any) -> None:
            """Say nothing."""

    return Handler

"""The HTTP server: keep-alive, answers in one piece or streamed.

The memory and connections that a client can take are bounded.
"""

from __future__ import annotations

import json
import socket
import ssl
import struct
import threading
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler
from typing import Any

from . import _websocket
from ._connections import HEAD_BYTES, Connections, Head

Json = dict[str, Any]

# The bytes of a refused body that are thrown away before the connection is closed.
_PASSED_OVER = 4 << 20
_PIECE_BYTES = 1 << 16


@dataclass(frozen=True)
class Request:
    """A request of a client."""

    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    raw_query: str = ""

    def every(self, name: str) -> list[str]:
        """Return all values of a parameter that is given several times, in their order."""
        pairs = urllib.parse.parse_qsl(self.raw_query, keep_blank_values=True)
        return [value for key, value in pairs if key == name]

    def flag(self, name: str) -> bool:
        """Return whether a parameter of the query is true, in any of its usual spellings."""
        return self.query.get(name) in ("1", "t", "T", "true", "TRUE", "True")


@dataclass(frozen=True)
class Response:
    """The answer to a client.

    Attributes:
        status: the HTTP status.
        body: an iterator is sent piece by piece as it comes.
        kind: the content type.
        headers: more headers.
        talk: the conversation that follows, if the connection becomes a WebSocket.
    """

    status: int
    body: bytes | Iterator[bytes]
    kind: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)
    talk: _websocket.Talk | None = None


class CutError(Exception):
    """The order to drop the connection without an answer."""


def as_json(status: int, value: Any, headers: Mapping[str, str] | None = None) -> Response:
    """Return an answer in JSON."""
    body = json.dumps(value, separators=(",", ":")).encode()
    return Response(status, body, headers=headers or {})


class _Answering(Connections):
    """The connections of a server, with what answers their requests."""

    handle: Callable[[Request], Response]
    admit: Callable[[Request], Response | None]


class Server:
    """Listens on loopback from ``start`` to ``stop``.

    Args:
        handle: Answers a request, or raises ``CutError``.
        port: The port; 0 for a free one.
        context: The context for TLS; None for plain HTTP.
        admit: Looks at a request before its body is read, and returns the answer if it is refused;
            the connection is closed then. The length of the body is in its headers.
        idle_seconds: After so long without a byte from the client, its connection is closed.
        most_connections: How many may be open. For one more, the one that has been without an
            admitted request for longest is closed, so that slow and silent clients do not block
            others; if all are at work, the new one is closed at once.
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
        self._inner = _Answering(("127.0.0.1", port), _Handler)
        self._inner.handle, self._inner.admit = handle, admit or (lambda _: None)
        self._inner.context = context
        self._inner.idle_seconds = idle_seconds
        self._inner.most_connections = most_connections
        self._thread = threading.Thread(
            target=self._inner.serve_forever, args=(0.01,), name="stand-in", daemon=True
        )

    @property
    def port(self) -> int:
        """Return the port it listens on."""
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


def _length(head: Request) -> int | None:
    """Return the announced bytes of the body; None if that is not a possible number of bytes."""
    text = head.headers.get("content-length", "0")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 16 else None


def _without_length(head: Request) -> Response | None:
    """Return the refusal of a request without a valid length; None if it has one."""
    if "transfer-encoding" in head.headers:
        return Response(411, b"send a Content-Length instead of chunks\n", "text/plain")
    if _length(head) is None:
        return Response(400, b"Content-Length must be a number of bytes\n", "text/plain")
    return None


class _Handler(BaseHTTPRequestHandler):
    """Reads requests of one connection, and answers them."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1  # one packet for head and body
    server: _Answering

    def setup(self) -> None:
        """Bound the size of a head."""
        super().setup()
        self.rfile = Head(self.rfile)  # type: ignore[assignment]

    def handle_one_request(self) -> None:
        """Read a request and answer it."""
        self.server.waits(self.connection)
        self.rfile.left = HEAD_BYTES  # type: ignore[attr-defined]
        super().handle_one_request()

    def handle_expect_100(self) -> bool:
        """Send nothing yet: only the sender of an admitted request may send its body."""
        return True

    def _answer(self) -> None:
        try:
            parts = urllib.parse.urlsplit(self.path)
        except ValueError:
            self.send_error(400)
            return
        query = dict(urllib.parse.parse_qsl(parts.query, keep_blank_values=True))
        headers = {key.lower(): value for key, value in self.headers.items()}
        path = urllib.parse.unquote(parts.path)
        head = Request(self.command, path, query, headers, b"", parts.query)
        refused = _without_length(head) or self.server.admit(head)
        if refused is not None:
            self.close_connection = True
            self._send(refused)
            self._pass_over(head)
            return
        self.server.works(self.connection)
        if headers.get("expect", "").lower() == "100-continue":
            self.send_response_only(100)
            self.end_headers()
            self.wfile.flush()
        body = self._body(_length(head) or 0)
        if body is None:  # the client has gone
            self.close_connection = True
            return
        try:
            response = self.server.handle(replace(head, body=body))
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

    def _body(self, length: int) -> bytes | None:
        """Return the body, or None if it ends too early.

        Memory is taken only for the bytes that have come, not for all that were announced.
        """
        pieces = []
        while length > 0:
            piece = self.rfile.read1(min(length, _PIECE_BYTES))
            if not piece:
                return None
            pieces.append(piece)
            length -= len(piece)
        return b"".join(pieces)

    def _pass_over(self, head: Request) -> None:
        """Throw away what follows a refused request.

        A close with unread bytes would reset the connection, and the answer would be lost.
        """
        self.wfile.flush()
        length = _length(head)
        left = _PASSED_OVER if length is None else min(length, _PASSED_OVER)
        while left > 0 and (piece := self.rfile.read1(min(left, _PIECE_BYTES))):
            left -= len(piece)

    def _send(self, response: Response) -> None:
        self.send_response(response.status)
        self.send_header("Content-Type", response.kind)
        for key, value in response.headers.items():
            self.send_header(key, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        if isinstance(response.body, bytes):
            # The answer to a HEAD has the length of another body.
            if "Content-Length" not in response.headers:
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
        """Reset the connection, so that the client sees an error and not an end."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()

    def log_message(self, *args: Any) -> None:
        """Write no log."""

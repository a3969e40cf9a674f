"""The server's side of a WebSocket, on a connection whose request has been read."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from websockets.datastructures import Headers
from websockets.frames import Frame, Opcode
from websockets.http11 import Request
from websockets.protocol import State
from websockets.server import ServerProtocol
from websockets.typing import Subprotocol

MOST_BYTES = 32 * 2**20  # the most in one message


@dataclass(frozen=True)
class Talk:
    """A conversation over a WebSocket.

    Attributes:
        subprotocols: those that the server understands, the best one first.
        run: called once the client and the server agree on one of them; the connection ends when it
            returns.
    """

    subprotocols: tuple[str, ...]
    run: Callable[[WebSocket], None]


class WebSocket:
    """An open connection, for one thread.

    The thread waits until the connection is readable and then calls ``receive``.

    Attributes:
        subprotocol: the one that client and server agreed on.
    """

    def __init__(self, connection: socket.socket, protocol: ServerProtocol) -> None:
        self.subprotocol = str(protocol.subprotocol)
        self._connection = connection
        self._protocol = protocol
        self._parts: list[bytes] = []

    def fileno(self) -> int:
        """Return the descriptor, for selectors."""
        return self._connection.fileno()

    def receive(self) -> list[bytes] | None:
        """Return the messages that have arrived, as bytes; None if no more will come.

        It waits if there is nothing to read.
        """
        data = self._read()
        if data:
            self._protocol.receive_data(data)
        else:
            self._protocol.receive_eof()
        messages, kinds = [], (Opcode.TEXT, Opcode.BINARY, Opcode.CONT)
        for event in self._protocol.events_received():
            if isinstance(event, Frame) and event.opcode in kinds:
                self._parts.append(bytes(event.data))
                if event.fin:
                    messages.append(b"".join(self._parts))
                    self._parts.clear()
        _flush(self._connection, self._protocol)
        return messages if messages or self._protocol.state is State.OPEN else None

    def send(self, message: bytes) -> None:
        """Send one message; do nothing if the client has gone."""
        if self._protocol.state is State.OPEN:
            self._protocol.send_binary(message)
            _flush(self._connection, self._protocol)

    def close(self) -> None:
        """Announce that no more will come, and wait until the client has heard it."""
        if self._protocol.state is State.OPEN:
            self._protocol.send_close(1000)
            _flush(self._connection, self._protocol)
        # Then the server ends the connection; a client that follows RFC 6455 (7.1.1) waits for
        # that.
        while self._protocol.state is State.CLOSING and self._protocol.close_rcvd is None:
            self.receive()

    def _read(self) -> bytes:
        data = b""
        with contextlib.suppress(OSError):  # the client has gone
            data = self._connection.recv(65536)
            # Selectors do not see what TLS has decrypted already.
            while isinstance(self._connection, ssl.SSLSocket) and self._connection.pending():
                data += self._connection.recv(65536)
        return data


def serve(
    connection: socket.socket, path: str, headers: Iterable[tuple[str, str]], talk: Talk
) -> None:
    """Shake hands about a request that has been read, talk, and close.

    A request that is not a handshake is refused.
    """
    protocol = ServerProtocol(
        subprotocols=[Subprotocol(name) for name in talk.subprotocols], max_size=MOST_BYTES
    )
    # The protocol object parses the request itself.
    protocol.receive_data(Request(path, Headers(headers)).serialize())
    (request,) = protocol.events_received()
    assert isinstance(request, Request)
    protocol.send_response(protocol.accept(request))
    _flush(connection, protocol)
    if protocol.state is State.OPEN:
        web_socket = WebSocket(connection, protocol)
        talk.run(web_socket)
        web_socket.close()


def _flush(connection: socket.socket, protocol: ServerProtocol) -> None:
    for data in protocol.data_to_send():
        if data:  # an empty one asks for the end of the connection, which comes anyway
            with contextlib.suppress(OSError):
                connection.sendall(data)

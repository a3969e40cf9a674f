"""The thread that serves gRPC."""

from __future__ import annotations

import asyncio
import socket
import threading
import weakref
from collections.abc import Collection, Coroutine, Sequence
from typing import Any

import grpclib.protocol
import grpclib.server
from grpclib._typing import IServable

from ..._server._faults import Calls, Faults
from .._workspace._workspace import Workspace
from ._api import Api
from ._blobs import Blobs
from ._context import Bell

# One to make the transport, one to inform the protocol, one to wake the waiter; and one to spare.
_TURNS_TO_ACCEPT = 4


class Serving:
    """Serves a workspace on loopback, from its creation to ``stop``.

    Attributes:
        port: the port on which gRPC is served.

    Raises:
        OSError: the port cannot be used.
    """

    def __init__(
        self,
        workspace: Workspace,
        port: int,
        token: tuple[str, str],
        faults: Faults,
        calls: Calls,
    ) -> None:
        self.port = 0
        self._workspace = workspace
        self._loop = asyncio.new_event_loop()
        self._bell = Bell(self._loop)
        self._blobs = Blobs(workspace)
        self._api = Api(workspace, token, faults, calls, self._bell, self._blobs.url)
        self._server: _Server | None = None
        self._kept: socket.socket | None = None  # holds the port while nothing listens on it
        self._thread = threading.Thread(target=self._loop.run_forever, name="modal", daemon=True)
        self._thread.start()
        self._blobs.start()
        try:
            self._do(self._listen(port))
        except BaseException:
            self._end()
            raise
        with workspace.lock:
            workspace.listeners.append(self._bell.ring)

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def stop(self) -> None:
        """Close the port and all connections."""
        with self._workspace.lock:
            self._workspace.listeners.remove(self._bell.ring)
        self._bell.close()
        self._do(self._close())
        self._end()

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._blobs.stop()

    def refuse(self) -> None:
        """Cut all connections, and refuse new ones; do nothing if it does so already."""
        self._do(self._refuse())

    def accept(self) -> None:
        """Let connections in again, on the same port; do nothing if it does so already.

        Raises:
            OSError: the port cannot be used any more.
        """
        self._do(self._accept())

    async def _close(self) -> None:
        await self._shut()
        if self._kept is not None:
            self._kept.close()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await asyncio.sleep(0)  # lets the loop close the sockets

    async def _listen(self, port: int) -> None:
        server = _Server([self._api])
        await server.start("127.0.0.1", port)
        self._server, self.port = server, server.port()

    async def _shut(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            await server.accept_no_more()
            server.close()
            await server.wait_closed()
            server.hang_up()

    async def _refuse(self) -> None:
        if self._server is not None:
            await self._shut()
            self._kept = socket.socket()
            self._kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._kept.bind(("127.0.0.1", self.port))

    async def _accept(self) -> None:
        if self._kept is not None:
            self._kept.close()
            self._kept = None
            await self._listen(self.port)


class _Server(grpclib.server.Server):  # type: ignore[misc]
    """A server that also closes the connections that its clients leave open."""

    def __init__(self, handlers: Collection[IServable]) -> None:
        super().__init__(handlers)
        self._transports: weakref.WeakSet[asyncio.Transport] = weakref.WeakSet()

    def _protocol_factory(self) -> grpclib.protocol.H2Protocol:
        protocol = super()._protocol_factory()
        made = protocol.connection_made

        def connection_made(transport: asyncio.Transport) -> None:
            self._transports.add(transport)
            made(transport)

        protocol.connection_made = connection_made
        return protocol

    async def accept_no_more(self) -> None:
        """Let no more connections in, and wait until those that have just come are set up.

        A connection gets its transport some turns of the loop after it was accepted. If the server
        is closed in between, asyncio forgets the socket without closing it.
        """
        for listening in self._listening():
            asyncio.get_running_loop().remove_reader(listening.fileno())
        for _ in range(_TURNS_TO_ACCEPT):
            await asyncio.sleep(0)

    def port(self) -> int:
        """Return the port, once the server has started."""
        return int(self._listening()[0].getsockname()[1])

    def _listening(self) -> Sequence[socket.socket]:
        """Return the sockets that clients connect to; grpclib keeps its server private."""
        assert isinstance(self._server, asyncio.Server)
        return self._server.sockets

    def hang_up(self) -> None:
        """Close every connection, even with data still to be sent."""
        for transport in list(self._transports):
            transport.abort()

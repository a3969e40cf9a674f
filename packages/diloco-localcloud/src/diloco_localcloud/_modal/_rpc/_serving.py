"""The thread on which gRPC is served."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from typing import TYPE_CHECKING

import grpclib.protocol
import grpclib.server

from ._api import Api
from ._blobs import Blobs
from ._context import Bell

if TYPE_CHECKING:
    from collections.abc import Collection

    from grpclib._typing import IServable

    from ..._server._faults import Calls, Faults
    from .._workspace._workspace import Workspace


class Serving:
    """Serves a workspace on loopback, from its making to ``stop``.

    Attributes:
        port: on which gRPC is served.

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
        self._asked = (port, token, faults, calls)
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()
        self._bell = Bell(self._loop)
        self._blobs = Blobs(workspace)
        self._up = threading.Event()
        self._wrong: list[OSError] = []
        self._thread = threading.Thread(target=self._run, name="modal", daemon=True)
        self._thread.start()
        self._up.wait()
        if self._wrong:
            self._thread.join()
            raise self._wrong[0]

    def stop(self) -> None:
        """Close the port and all connections."""
        with self._workspace.lock:
            self._workspace.listeners.remove(self._bell.ring)
        self._bell.close()
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()
        self._blobs.stop()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()
            self._up.set()

    async def _serve(self) -> None:
        port, token, faults, calls = self._asked
        api = Api(self._workspace, token, faults, calls, self._bell, self._blobs.url)
        server = _Server([api])
        self._blobs.start()
        try:
            await server.start("127.0.0.1", port)
        except OSError as wrong:
            self._wrong.append(wrong)
            self._blobs.stop()
            return
        self.port = _port(server)
        with self._workspace.lock:
            self._workspace.listeners.append(self._bell.ring)
        self._up.set()
        await self._over.wait()
        server.close()
        await server.wait_closed()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        with contextlib.suppress(Exception):
            await asyncio.gather(*left, return_exceptions=True)
        server.hang_up()
        await asyncio.sleep(0)  # for the loop to close the sockets


class _Server(grpclib.server.Server):  # type: ignore[misc]
    """A server that also closes the connections of clients which do not close them."""

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

    def hang_up(self) -> None:
        """Close every connection, whatever is still to be sent."""
        for transport in list(self._transports):
            transport.abort()


def _port(server: grpclib.server.Server) -> int:
    """The port of a server that has started; grpclib keeps its sockets to itself."""
    inner = server._server  # noqa: SLF001 - there is no other way to it
    assert inner is not None
    return int(inner.sockets[0].getsockname()[1])

"""The scripted stand-in of Modal."""

from __future__ import annotations

import time

from .._server._timeline import Timeline
from ._scripted._world import ModalWorld
from ._service import Service
from ._workspace._workspace import Workspace

_BEHIND = 20 * 86400


class ModalStandIn(Service):
    """Modal's API on loopback, with calls of functions that a test moves on a virtual clock.

    It serves what the ``modal`` package needs to deploy apps, to find and call functions, to look
    at calls, to cancel them and to read their logs; and Dicts, secrets and blobs. Needs
    ``diloco-localcloud[modal]``.

    Args:
        port: to listen on; 0 for a free one.
        workspace: its name.
        start: where the virtual clock begins, in seconds since the epoch. By default twenty days
            ago: the client asks for logs up to the time of its own clock, and would not see those
            of a virtual clock that is ahead.
        real_time: the clock is that of the wall instead, and nobody moves it.

    Attributes:
        world: the calls and the clock, in the hands of the test.
        faults: what goes wrong over gRPC. The verb is an RPC, such as ``FunctionMap``; the resource
            is ``modal``.
        calls: what was called, named in the same way. Statuses are those of HTTP that belong to the
            statuses of gRPC.

    Raises:
        StandInError: no such port.

    ``start``, ``stop`` or a ``with`` block; everything about it is thread-safe.
    """

    def __init__(
        self,
        *,
        port: int = 0,
        workspace: str = "stand-in",
        start: float | None = None,
        real_time: bool = False,
    ) -> None:
        begin = float(int(time.time()) - _BEHIND) if start is None else start
        timeline = Timeline(begin, time.time if real_time else None)
        super().__init__(Workspace(timeline, workspace), port)
        self.world = ModalWorld(self._workspace)

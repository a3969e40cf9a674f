"""The scripted stand-in for Modal."""

from __future__ import annotations

import time

from .._server._timeline import Timeline
from ._scripted import ModalWorld
from ._service import ModalService
from ._workspace._workspace import Workspace

_BEHIND = 20 * 86400


class ModalStandIn(ModalService):
    """Modal's API on loopback, with calls of functions that a test moves on a virtual clock.

    It serves the RPCs with which the ``modal`` package deploys apps, finds and calls functions,
    looks at calls, cancels them and reads their logs; and Dicts, secrets and blobs. Needs
    ``diloco-localcloud[modal]``.

    Args:
        port: the port to listen on; 0 for a free one.
        workspace: the name of the workspace.
        start: where the virtual clock begins, in seconds since the epoch. By default twenty days
            ago: the client asks for logs up to the time of its own clock, and would not see those
            of a virtual clock that is ahead.

    Attributes:
        world: the calls and the clock, which the test moves.
        faults: the faults that requests over gRPC meet. The verb is an RPC, such as
            ``FunctionMap``; the resource is ``modal``.
        calls: the requests so far, named in the same way. Their statuses are the HTTP statuses that
            correspond to those of gRPC.

    Raises:
        StandInError: no such port.

    Use ``start`` and ``stop``, or a ``with`` block; everything about it is thread-safe.
    """

    def __init__(
        self,
        *,
        port: int = 0,
        workspace: str = "stand-in",
        start: float | None = None,
    ) -> None:
        begin = float(int(time.time()) - _BEHIND) if start is None else start
        timeline = Timeline(begin)
        super().__init__(Workspace(timeline, workspace), port)
        self.world = ModalWorld(self._workspace)

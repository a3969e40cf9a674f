"""The stand-in for Modal that really runs the called functions."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Self

from .._server._errors import StandInError
from .._server._timeline import Timeline
from ._processes import LocalCalls, Runner
from ._service import ModalService
from ._workspace._workspace import Workspace


class ModalProcesses(ModalService):
    """Modal's API on loopback whose containers are processes of this machine, in real time.

    Each call runs in Modal's own entrypoint of containers, in a process with a session of its own,
    in a folder of its own, with the Python of this process. Local files that are sent with a
    function are there; images are not built, and volumes are not mounted. When the stand-in stops,
    or is killed, all processes end. Needs ``diloco-localcloud[modal]``.

    Args:
        port: the port to listen on; 0 for a free one.
        workspace: the name of the workspace.
        env: the variables that the "image" gives every container; None for PATH (with this Python
            first), HOME, PYTHONPATH and a few more variables of this process. The variables of the
            function's secrets are added to them.
        grace_seconds: the time between SIGINT and SIGKILL for a container that has to end.

    Attributes:
        world: the calls, which a test may preempt, kill or stop; Dicts, secrets, environments and
            habits.
        faults: the faults that requests over gRPC meet. The verb is an RPC, such as
            ``FunctionMap``; the resource is ``modal``.
        calls: the requests so far, named in the same way, including those of the containers.

    Raises:
        StandInError: no such port, or a negative grace.

    Use ``start`` and ``stop``, or a ``with`` block; it can be started once. Thread-safe.
    """

    def __init__(
        self,
        *,
        port: int = 0,
        workspace: str = "stand-in",
        env: Mapping[str, str] | None = None,
        grace_seconds: float = 30.0,
    ) -> None:
        if grace_seconds < 0:
            raise StandInError(f"grace_seconds must be 0 or more, not {grace_seconds}")
        super().__init__(Workspace(Timeline(0.0, time.time), workspace), port)
        self._runner = Runner(self._workspace, *self._run_programs(env))
        self._workspace.calls.program = self._runner
        self._workspace.habits.auto_start = 0.0
        self._workspace.habits.grace_seconds = grace_seconds
        self.world = LocalCalls(self._workspace, self._runner)

    def start(self) -> Self:
        """Begin to listen, and to run the called functions.

        Raises:
            StandInError: it runs or ran already, the port is taken, or the extra ``modal`` is not
                installed.
        """
        super().start()
        from ._rpc._handles import arguments

        self._runner.arguments = arguments
        self._runner.connect = self.environment
        return self

    def _end_programs(self) -> None:
        self._runner.close()

"""The stand-ins for Modal: what they share, and the two public classes."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

from .._server._errors import StandInError
from .._server._faults import Calls, Faults
from .._server._service import Service
from .._server._timeline import Timeline
from ._processes import LocalCalls, Runner
from ._scripted import ModalWorld
from ._workspace._workspace import Workspace

if TYPE_CHECKING:
    from ._rpc._serving import Serving

_ENVIRONMENT_LOCK = threading.Lock()


class ModalService(Service):
    """A workspace on loopback."""

    def __init__(self, workspace: Workspace, port: int) -> None:
        super().__init__(port, workspace.timeline, workspace.lock)
        self._token = f"ak-{secrets.token_hex(11)}", f"as-{secrets.token_hex(11)}"
        self._workspace = workspace
        self._serving: Serving | None = None
        self.faults = Faults()
        self.calls = Calls()

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables with which any client of Modal finds it.

        With them a client reads no settings of this user.

        Raises:
            StandInError: it is not started.
        """
        return {
            "MODAL_SERVER_URL": self.url,
            "MODAL_TOKEN_ID": self._token[0],
            "MODAL_TOKEN_SECRET": self._token[1],
            "MODAL_CONFIG_PATH": os.devnull,
            "NO_PROXY": "127.0.0.1",
        }

    def _served(self) -> Serving:
        self._running()
        assert self._serving is not None
        return self._serving

    def client(self) -> Any:
        """Return a ``modal.Client`` of it, to be passed as ``client=``; the caller closes it.

        The client reads the environment while it is made, so the environment is changed for that
        long.

        Raises:
            StandInError: it is not started.
        """
        import modal

        with _ENVIRONMENT_LOCK:
            kept = {name: os.environ.get(name) for name in self.environment}
            os.environ.update(self.environment)
            try:
                return modal.Client.from_credentials(*self._token)
            finally:
                for name, value in kept.items():
                    os.environ.pop(name) if value is None else os.environ.update({name: value})

    def _listen(self) -> Serving:
        try:
            from ._rpc._serving import Serving
        except ImportError as missing:
            message = (
                "Modal's client is missing; install diloco-localcloud with its extra: "
                "diloco-localcloud[modal]"
            )
            raise StandInError(f"{message} ({missing})") from None
        self._serving = Serving(self._workspace, self._port, self._token, self.faults, self.calls)
        return self._serving

    def refuse(self) -> None:
        """Cut all gRPC connections and refuse new ones until ``accept``, as if Modal were down.

        Raises:
            StandInError: it is not started.
        """
        self._served().refuse()

    def accept(self) -> None:
        """Let connections in again, on the same port; do nothing if it does so already.

        Raises:
            StandInError: it is not started, or another process has taken the port meanwhile.
        """
        try:
            self._served().accept()
        except OSError as wrong:
            raise StandInError(f"the port cannot be used any more: {wrong.strerror}") from None


_BEHIND = 20 * 86400


class ModalStandIn(ModalService):
    """Modal's API on loopback, with calls of functions that a test moves on a virtual clock.

    It serves the RPCs with which the ``modal`` package deploys apps, finds and calls functions,
    looks at calls, cancels them and reads their logs; and Dicts, secrets and blobs. Needs
    ``diloco-localcloud[modal]``.

    Args:
        port: the port to listen on; 0 for a free one.
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
        start: float | None = None,
    ) -> None:
        begin = float(int(time.time()) - _BEHIND) if start is None else start
        timeline = Timeline(begin)
        super().__init__(Workspace(timeline), port)
        self.world = ModalWorld(self._workspace)


class ModalProcesses(ModalService):
    """Modal's API on loopback whose containers are processes of this machine, in real time.

    Each call runs in Modal's own entrypoint of containers, in a process with a session of its own,
    in a folder of its own, with the Python of this process. Local files that are sent with a
    function are there; images are not built, and volumes are not mounted. When the stand-in stops,
    or is killed, all processes end. Needs ``diloco-localcloud[modal]``.

    Args:
        port: the port to listen on; 0 for a free one.
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
        env: Mapping[str, str] | None = None,
        grace_seconds: float = 30.0,
    ) -> None:
        if grace_seconds < 0:
            raise StandInError(f"grace_seconds must be 0 or more, not {grace_seconds}")
        super().__init__(Workspace(Timeline(0.0, time.time)), port)
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

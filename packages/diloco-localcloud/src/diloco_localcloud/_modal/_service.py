"""The part that all stand-ins for Modal share: port, token, the environment of a client."""

from __future__ import annotations

import os
import secrets
import threading
from typing import TYPE_CHECKING, Any

from .._server._errors import StandInError
from .._server._faults import Calls, Faults
from .._server._service import Service
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

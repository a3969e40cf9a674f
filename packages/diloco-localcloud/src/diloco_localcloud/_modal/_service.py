"""The part that all stand-ins for Modal share: port, token, the environment of a client."""

from __future__ import annotations

import os
import secrets
import threading
from typing import TYPE_CHECKING, Any, Self

from .._server._errors import StandInError
from .._server._faults import Calls, Faults
from .._server._ticker import Ticker

if TYPE_CHECKING:
    from ._rpc._serving import Serving
    from ._workspace._workspace import Workspace

_ENVIRONMENT_LOCK = threading.Lock()


class Service:
    """A workspace on loopback: ``start``, ``stop`` or a ``with`` block; thread-safe."""

    def __init__(self, workspace: Workspace, port: int) -> None:
        if not 0 <= port <= 65535:
            raise StandInError(f"port must be from 0 to 65535, not {port}")
        self._port = port
        self._token = f"ak-{secrets.token_hex(11)}", f"as-{secrets.token_hex(11)}"
        self._workspace = workspace
        self._serving: Serving | None = None
        self._ticker: Ticker | None = None
        self.faults = Faults()
        self.calls = Calls()

    @property
    def url(self) -> str:
        """Return its URL, such as ``http://127.0.0.1:40123``.

        Raises:
            StandInError: it is not started.
        """
        return f"http://127.0.0.1:{self._served().port}"

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
        if self._serving is None:
            raise StandInError(
                "the stand-in is not started; call start(), or use it in a with block"
            )
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

    def start(self) -> Self:
        """Begin to listen.

        Raises:
            StandInError: it is already running, the port is taken, or the extra ``modal`` is not
                installed.
        """
        if self._serving is not None:
            raise StandInError("the stand-in is already running")
        try:
            from ._rpc._serving import Serving
        except ImportError as missing:
            message = (
                "Modal's client is missing; install diloco-localcloud with its extra: "
                "diloco-localcloud[modal]"
            )
            raise StandInError(f"{message} ({missing})") from None
        try:
            self._serving = Serving(
                self._workspace, self._port, self._token, self.faults, self.calls
            )
        except OSError as wrong:
            message = (
                f"port {self._port} of 127.0.0.1 cannot be used: {wrong.strerror}; "
                "choose another, or 0 for a free one"
            )
            raise StandInError(message) from None
        if not self._workspace.timeline.virtual:
            self._ticker = Ticker(self._workspace.timeline, self._workspace.lock)
            self._ticker.start()
        return self

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

    def stop(self) -> None:
        """Close the port and all connections; may be called twice."""
        if self._ticker is not None:
            self._ticker.stop()
            self._ticker = None
        if self._serving is not None:
            self._serving.stop()
            self._serving = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

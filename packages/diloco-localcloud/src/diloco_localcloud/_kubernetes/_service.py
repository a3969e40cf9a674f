"""The part that all stand-ins for Kubernetes share: the API on loopback."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any, Self

from .._server import _tls
from .._server._errors import StandInError
from .._server._http import Server
from ._api import _kubeconfig
from ._api._access import Access
from ._api._api import Api
from ._api._checks._names import LABEL_WORDS, is_label

if TYPE_CHECKING:
    from pathlib import Path

    from .._server._faults import Calls, Faults
    from ._control._cluster import Cluster

Json = dict[str, Any]


class Service:
    """A cluster's API, from ``start`` to ``stop``."""

    def __init__(self, cluster: Cluster, *, port: int, tls: bool | None, namespace: str) -> None:
        if not 0 <= port <= 65535:
            raise StandInError(f"port must be from 0 to 65535, not {port}")
        if not is_label(namespace):
            raise StandInError(f"no namespace can have the name {namespace!r}: {LABEL_WORDS}")
        self._cluster = cluster
        self._port = port
        self._tls = _tls.available() if tls is None else tls
        self._namespace = namespace
        self._token = secrets.token_urlsafe(24)
        self._authority: str | None = None
        self._server: Server | None = None
        self.access = Access("stand-in-user", self._token)
        self._api = Api(cluster, self.access)
        self.faults: Faults = self._api.faults
        self.calls: Calls = self._api.calls
        if namespace != "default":
            with cluster.changed:
                cluster.add_namespace({"metadata": {"name": namespace}})

    @property
    def url(self) -> str:
        """Return its URL, such as ``https://127.0.0.1:40123``.

        Raises:
            StandInError: it is not started.
        """
        if self._server is None:
            raise StandInError(
                "the stand-in is not started; call start(), or use it in a with block"
            )
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self._server.port}"

    @property
    def token(self) -> str:
        """Return the bearer token."""
        return self._token

    @property
    def authority(self) -> str | None:
        """Return the certificate authority to trust (PEM); None without TLS or before the start."""
        return self._authority

    def start(self) -> Self:
        """Begin to listen.

        Raises:
            StandInError: it is already running, the port is taken, or no certificate can be made.
        """
        if self._server is not None:
            raise StandInError("the stand-in is already running")
        context = None
        if self._tls:
            context, self._authority = _tls.make()
        try:
            self._server = Server(self._api.handle, self._port, context, admit=self._api.admit)
        except OSError as wrong:
            message = (
                f"port {self._port} of 127.0.0.1 cannot be used: {wrong.strerror}; "
                "choose another, or 0 for a free one"
            )
            raise StandInError(message) from None
        self._cluster.stopped = False
        self._server.start()
        return self

    def stop(self) -> None:
        """Close the port and all connections; may be called twice."""
        with self._cluster.changed:
            self._cluster.stopped = True
            self._cluster.changed.notify_all()
        if self._server is not None:
            self._server.stop()
            self._server = None

    def kubeconfig(self, path: str | Path) -> Path:
        """Write a kubeconfig for it, readable by its owner only.

        Raises:
            StandInError: it cannot be written, or the stand-in is not started.
        """
        return _kubeconfig.write(path, self.kubeconfig_dict())

    def kubeconfig_dict(self) -> Json:
        """Return the kubeconfig as an object.

        ``kubernetes.config.new_client_from_config_dict`` takes it.

        Raises:
            StandInError: it is not started.
        """
        return _kubeconfig.config(self.url, self._token, self._authority, self._namespace)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

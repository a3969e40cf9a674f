"""The part that all stand-ins for Kubernetes share: the API on loopback."""

from __future__ import annotations

import base64
import json
import os
import secrets
from pathlib import Path
from typing import Any

from .._server import _tls
from .._server._errors import StandInError
from .._server._faults import Calls, Faults
from .._server._files import replace
from .._server._http import Server
from .._server._service import Service
from ._api._access import Access
from ._api._api import Api
from ._api._checks._names import LABEL_WORDS, is_label
from ._control._cluster import Cluster
from ._control._garbage import GarbageCollector, NamespaceController
from ._control._images import Images
from ._control._job_controller import JobController
from ._control._nodes import Nodes
from ._jobs._backoff import FIRST_SECONDS

Json = dict[str, Any]


class KubernetesService(Service):
    """A cluster with its controllers, and its API."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        port: int,
        tls: bool | None,
        namespace: str,
        backoff_seconds: float = FIRST_SECONDS,
    ) -> None:
        super().__init__(port, cluster.timeline, cluster.changed)
        if not is_label(namespace):
            raise StandInError(f"no namespace can have the name {namespace!r}: {LABEL_WORDS}")
        self._cluster = cluster
        self._garbage = GarbageCollector(cluster)
        self._namespaces = NamespaceController(cluster)
        self._jobs = JobController(cluster, backoff_seconds=backoff_seconds)
        self.images = Images(cluster)
        self._nodes = Nodes(cluster)
        self._tls = _tls.available() if tls is None else tls
        self._scheme = "https" if self._tls else "http"
        self._namespace = namespace
        self._token = secrets.token_urlsafe(24)
        self._authority: str | None = None
        self.access = Access("stand-in-user", self._token)
        self._api = Api(cluster, self.access)
        self.faults: Faults = self._api.faults
        self.calls: Calls = self._api.calls
        if namespace != "default":
            with cluster.changed:
                cluster.add_namespace({"metadata": {"name": namespace}})

    @property
    def token(self) -> str:
        """Return the bearer token."""
        return self._token

    @property
    def authority(self) -> str | None:
        """Return the certificate authority to trust (PEM); None without TLS or before the start."""
        return self._authority

    def _listen(self) -> Server:
        context = None
        if self._tls:
            context, self._authority = _tls.make()
        server = Server(self._api.handle, self._port, context, admit=self._api.admit)
        self._cluster.stopped = False
        server.start()
        return server

    def stop(self) -> None:
        """Close the port, end every program and delete the files; may be called twice."""
        with self._cluster.changed:
            self._cluster.stopped = True
            self._cluster.changed.notify_all()
        super().stop()

    def kubeconfig(self, path: str | Path) -> Path:
        """Write a kubeconfig for it, readable by its owner only.

        Raises:
            StandInError: it cannot be written, or the stand-in is not started.
        """
        target, content = Path(path), self.kubeconfig_dict()
        try:
            # Not in place: a process that has an existing file open would read the token. A link
            # stays a link. It is JSON, which is YAML.
            replace(Path(os.path.realpath(target)), (json.dumps(content, indent=2) + "\n").encode())
        except OSError as wrong:
            raise StandInError(
                f"the kubeconfig cannot be written to {target}: {wrong.strerror}; choose another "
                "path"
            ) from None
        return target

    def kubeconfig_dict(self) -> Json:
        """Return the kubeconfig as an object.

        ``kubernetes.config.new_client_from_config_dict`` takes it.

        Raises:
            StandInError: it is not started.
        """
        cluster = {"server": self.url}
        if self._authority is not None:
            trusted = base64.b64encode(self._authority.encode()).decode()
            cluster["certificate-authority-data"] = trusted
        name = "diloco-stand-in"
        context = {"cluster": name, "user": name, "namespace": self._namespace}
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": name, "cluster": cluster}],
            "users": [{"name": name, "user": {"token": self._token}}],
            "contexts": [{"name": name, "context": context}],
            "current-context": name,
        }

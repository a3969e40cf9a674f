"""The stand-ins for Kubernetes: what they share, and the two public classes."""

from __future__ import annotations

import base64
import json
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .._server import _tls
from .._server._errors import StandInError
from .._server._faults import Calls, Faults
from .._server._files import replace
from .._server._http import Server
from .._server._service import Service
from .._server._timeline import Timeline
from ._api._access import Access
from ._api._api import Api
from ._api._checks._names import LABEL_WORDS, is_label
from ._control._cluster import Cluster
from ._control._garbage import GarbageCollector, NamespaceController
from ._control._images import Images
from ._control._job_controller import JobController
from ._control._nodes import Node, Nodes
from ._jobs._backoff import FIRST_SECONDS
from ._objects._resources import KUEUE_VERSIONS
from ._pods import _scheduling
from ._processes._kubelet import ProcessKubelet
from ._processes._pod import LocalPods
from ._scripted._world import World

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


# 2026-01-01T00:00:00Z, where virtual clocks begin.
EPOCH = 1767225600.0


class KubernetesStandIn(KubernetesService):
    """A Kubernetes API on loopback, with a real controller's Jobs, and pods that a test moves.

    Args:
        port: the port to listen on; 0 for a free one.
        tls: serve HTTPS with a certificate of its own; None does so where the ``openssl`` command
            exists. The bearer token is required either way.
        namespace: the namespace of the kubeconfig; it is made if it is not ``default``.
        kueue: Kueue is installed: Jobs with a queue label are suspended until ``world.admit``.
            True, or the version of its API: ``v1beta1`` (also for True) or ``v1beta2``.
        nodes: the nodes on which pods are placed, by their requests, node selectors, required node
            affinity and tolerations; None for one node that takes every pod.
        strict_timing: a seed from which every delay of the control plane is drawn anew, within what
            was observed, so that things happen in orders that are rare otherwise, and some answers
            arrive late. 0 makes the delays the usual ones; so does None, unless pytest runs with
            ``--strict-timing``.

    Attributes:
        world: the pods and the clock, which the test moves.
        nodes: the nodes, which a test may add, lose, find again and remove.
        images: the images, which a test may refuse and allow.
        access: the permissions of the user.
        faults: the faults that requests over HTTP meet.
        calls: the requests so far.

    Raises:
        StandInError: no such port, or no such version of Kueue.

    Use ``start`` and ``stop``, or a ``with`` block; everything about it is thread-safe.
    """

    def __init__(
        self,
        *,
        port: int = 0,
        tls: bool | None = None,
        namespace: str = "default",
        kueue: bool | str = False,
        nodes: Sequence[Node] | None = None,
        strict_timing: int | None = None,
    ) -> None:
        declared = [Node("stand-in-0")] if nodes is None else nodes
        cluster = Cluster(
            Timeline(EPOCH),
            seed=0,
            nodes=[node.manifest() for node in declared],
            strict_timing=strict_timing,
        )
        super().__init__(cluster, port=port, tls=tls, namespace=namespace)
        version = KUEUE_VERSIONS[0] if kueue is True else kueue or None
        if version not in (None, *KUEUE_VERSIONS):
            raise StandInError(f"kueue must be a bool or one of {KUEUE_VERSIONS}, not {kueue!r}")
        self.nodes = self._nodes
        filters = () if nodes is None else _scheduling.ALL
        self.world = World(cluster, images=self.images, filters=filters, kueue=version)


class KubernetesProcesses(KubernetesService):
    """A Kubernetes API on loopback whose pods are processes of this machine, in real time.

    Every container is a process with a session of its own; image names are recorded, and nothing is
    pulled. When the stand-in stops, or is killed, all processes end.

    Args:
        port: the port to listen on; 0 for a free one.
        tls: serve HTTPS with a certificate of its own; None does so where the ``openssl`` command
            exists. The bearer token is required either way.
        namespace: the namespace of the kubeconfig; it is made if it is not ``default``.
        resources: the resources of the one node, such as ``{"nvidia.com/gpu": "8"}``, added to 64
            CPUs, 256 GiB and 2000 pods. Pods that ask for more stay unscheduled; their selectors
            and tolerations are not looked at.
        env: the variables that the "image" gives every container; None for PATH (with this Python
            first), HOME, PYTHONPATH and a few more variables of this process.
        backoff_seconds: the first wait of the Job controller before it replaces a failed pod; a
            real one waits 10.
        strict_timing: a seed from which the delays of a real control plane are drawn (0.5 to 3.4 s
            from an exit to the status of the Job, and more while the Job changes for other
            reasons), and some answers arrive late. 0 makes delays as short as possible; so does
            None, unless pytest runs with ``--strict-timing``.

    Attributes:
        pods: the pods, which a test may kill or evict.
        images: the images, which a test may refuse and allow.
        access: the permissions of the user.
        faults: the faults that requests over HTTP meet.
        calls: the requests so far.

    Raises:
        StandInError: no such port, or resources that are not quantities.

    Use ``start`` and ``stop``, or a ``with`` block; it can be started once. Thread-safe.
    """

    def __init__(
        self,
        *,
        port: int = 0,
        tls: bool | None = None,
        namespace: str = "default",
        resources: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
        backoff_seconds: float = 10.0,
        strict_timing: int | None = None,
    ) -> None:
        if backoff_seconds <= 0:
            raise StandInError(f"backoff_seconds must be above 0, not {backoff_seconds}")
        one = Node("local-0", resources=resources or {})
        offset = time.time() - time.monotonic()  # unlike the wall clock, this one must not jump
        clock = Timeline(0.0, clock=lambda: offset + time.monotonic())
        cluster = Cluster(
            clock,
            seed=time.time_ns(),
            nodes=[one.manifest()],
            strict_timing=strict_timing,
        )
        super().__init__(
            cluster, port=port, tls=tls, namespace=namespace, backoff_seconds=backoff_seconds
        )
        place, base = self._run_programs(env)
        self._kubelet = ProcessKubelet(cluster, self.images, [_scheduling.full], place, base)
        self.pods = LocalPods(self._kubelet)

    def _end_programs(self) -> None:
        self._kubelet.close()

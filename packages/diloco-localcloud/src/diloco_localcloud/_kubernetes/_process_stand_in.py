"""The stand-in for Kubernetes that really runs the pods."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from .._server._errors import StandInError
from .._server._timeline import Timeline
from ._control._cluster import Cluster
from ._control._nodes import Node
from ._pods import _scheduling
from ._processes._kubelet import ProcessKubelet
from ._processes._pod import LocalPods
from ._service import KubernetesService


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
            CPUs, 256 GiB and 2000 pods. Pods that ask for more stay unscheduled.
        labels: the labels of the one node, which takes pods whatever their selectors are.
        env: the variables that the "image" gives every container; None for PATH (with this Python
            first), HOME, PYTHONPATH and a few more variables of this process.
        backoff_seconds: the first wait of the Job controller before it replaces a failed pod; a
            real one waits 10.
        nodes: the nodes on which pods are placed, by their requests, node selectors, required node
            affinity and tolerations; None for the one node.
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
        StandInError: no such port, resources that are not quantities, or resources or labels
            together with nodes.

    Use ``start`` and ``stop``, or a ``with`` block; it can be started once. Thread-safe.
    """

    def __init__(
        self,
        *,
        port: int = 0,
        tls: bool | None = None,
        namespace: str = "default",
        resources: Mapping[str, str] | None = None,
        labels: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
        backoff_seconds: float = 10.0,
        nodes: Sequence[Node] | None = None,
        strict_timing: int | None = None,
    ) -> None:
        if nodes is not None and (resources or labels):
            raise StandInError(
                "resources and labels are those of the one node; with nodes, each has its own"
            )
        one = Node("local-0", labels or {}, resources=resources or {})
        declared, filters = (
            ([one], [_scheduling.full]) if nodes is None else (nodes, _scheduling.ALL)
        )
        if backoff_seconds <= 0:
            raise StandInError(f"backoff_seconds must be above 0, not {backoff_seconds}")
        offset = time.time() - time.monotonic()  # unlike the wall clock, this one must not jump
        clock = Timeline(0.0, clock=lambda: offset + time.monotonic())
        cluster = Cluster(
            clock,
            seed=time.time_ns(),
            nodes=[node.manifest() for node in declared],
            strict_timing=strict_timing,
        )
        super().__init__(
            cluster, port=port, tls=tls, namespace=namespace, backoff_seconds=backoff_seconds
        )
        place, base = self._run_programs(env)
        self._kubelet = ProcessKubelet(cluster, self.images, filters, place, base)
        self.pods = LocalPods(self._kubelet)

    def _end_programs(self) -> None:
        self._kubelet.close()

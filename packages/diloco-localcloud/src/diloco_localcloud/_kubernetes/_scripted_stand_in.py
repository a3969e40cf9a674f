"""The stand-in for Kubernetes whose pods a test moves."""

from __future__ import annotations

from collections.abc import Sequence

from .._server._errors import StandInError
from .._server._timeline import Timeline
from ._control._cluster import Cluster
from ._control._nodes import Node
from ._objects._resources import KUEUE_VERSIONS
from ._pods import _scheduling
from ._scripted._world import World
from ._service import KubernetesService

# 2026-01-01T00:00:00Z, where virtual clocks begin.
EPOCH = 1767225600.0


class KubernetesStandIn(KubernetesService):
    """A Kubernetes API on loopback, with a real controller's Jobs, and pods that a test moves.

    Args:
        port: the port to listen on; 0 for a free one.
        tls: serve HTTPS with a certificate of its own; None does so where the ``openssl`` command
            exists. The bearer token is required either way.
        namespace: the namespace of the kubeconfig; it is made if it is not ``default``.
        start: where the virtual clock begins, in seconds since the epoch.
        seed: the seed of names and uids.
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
        start: float = EPOCH,
        seed: int = 0,
        kueue: bool | str = False,
        nodes: Sequence[Node] | None = None,
        strict_timing: int | None = None,
    ) -> None:
        declared = [Node("stand-in-0")] if nodes is None else nodes
        cluster = Cluster(
            Timeline(start),
            seed=seed,
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

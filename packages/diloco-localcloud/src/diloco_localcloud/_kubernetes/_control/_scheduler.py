"""The scheduler: gives each pod a node, and reports why a pod fits on none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .._objects._resources import CLAIMS, NODES, PODS
from .._objects._store import Change
from .._pods import _facts, _states
from .._pods._scheduling import Filter, choose
from ._cluster import Cluster
from ._delays import Delay

Json = dict[str, Any]

BIND = Delay(0.01, 0.0, 0.3)  # from a pod, or from a change that may make room for one, to a node
SOURCE = "default-scheduler"


class Scheduler:
    """Places the pods that are added to it. All methods run under the cluster's lock.

    Args:
        cluster: the cluster with the nodes.
        filters: the tests of a node for a pod; without any, every pod fits, and only ``held`` holds
            it back.
        bound: called with each pod that was given a node.
        held: returns the reason why no pod may be placed; None if there is none.
    """

    def __init__(
        self,
        cluster: Cluster,
        filters: Sequence[Filter],
        bound: Callable[[Json], None],
        held: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._cluster = cluster
        self._filters = filters
        self._bound = bound
        self._held = held
        self._looking = False
        cluster.store.listeners.append(self._heard)

    def add(self, pod: Json) -> None:
        """Find a node for a new pod, soon."""
        seconds = self._cluster.delays.of(BIND)
        self._cluster.timeline.after(seconds, lambda: self.bind(pod["metadata"]))

    def bind(self, meta: Json) -> None:
        """Give a pod a node now, if it has none."""
        cluster = self._cluster
        pod = cluster.pod(meta)
        if pod is None or "nodeName" in pod["spec"] or _facts.deleting(pod):
            return
        why, node = self._held(), None
        if why is None:
            pods = cluster.store.list(PODS) if self._filters else ()
            nodes = cluster.store.list(NODES)
            node, why = choose(nodes, pods, pod, self._filters, self._missing_claim(pod))
        now = cluster.timeline.stamp()
        if node is None:
            cluster.put_pod(_states.unschedulable(pod, why, now))
            cluster.events.say(pod, "FailedScheduling", why, source=SOURCE, warning=True)
            return
        pod = _states.bound(pod, node, now)
        cluster.put_pod(pod)
        message = f"Successfully assigned {meta['namespace']}/{meta['name']} to {node}"
        cluster.events.say(pod, "Scheduled", message, source=SOURCE)
        self._bound(pod)

    def node_for(self, pod: Json) -> str:
        """Return the node for a pod that is to run without having been placed: the first one.

        It is for stand-ins without filters, on whose nodes every pod fits.

        Raises:
            ValueError: there are filters, so that the pod has to be placed first.
        """
        nodes = self._cluster.store.list(NODES)
        if self._filters or not nodes:
            why = _facts.condition(pod, "PodScheduled").get("message", "it was not looked at yet")
            raise ValueError(f"pod {pod['metadata']['name']} has no node: {why}")
        return str(nodes[0]["metadata"]["name"])

    def _missing_claim(self, pod: Json) -> str:
        """Return the message for a volume whose claim does not exist; empty if there is none."""
        for volume in pod["spec"].get("volumes") or []:
            name = (volume.get("persistentVolumeClaim") or {}).get("claimName")
            namespace = pod["metadata"]["namespace"]
            if name and self._cluster.store.find(CLAIMS, namespace, name) is None:
                return f'persistentvolumeclaim "{name}" not found'
        return ""

    def _heard(self, change: Change) -> None:
        leaves = change.resource is PODS and (
            change.new is None or (_facts.ended(change.new) and not _facts.ended(change.old or {}))
        )
        room = (leaves or change.resource is NODES) and self._filters
        if (room or change.resource is CLAIMS) and not self._looking:
            self._looking = True
            self._cluster.timeline.after(self._cluster.delays.of(BIND), self._again)

    def _again(self) -> None:
        """Try again to place the pods that fitted nowhere, since there may be room now."""
        self._looking = False
        for pod in self._cluster.store.list(PODS):
            if _facts.condition(pod, "PodScheduled").get("reason") == "Unschedulable":
                self.bind(pod["metadata"])

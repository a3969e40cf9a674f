"""The nodes of a stand-in: as a user declares them, lost, found again and removed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..._server._errors import StandInError
from .._objects._quantities import quantity
from .._objects._resources import NODES, PODS
from .._objects._store import Change
from .._pods import _facts, _scheduling, _states
from ._cluster import Cluster

Json = dict[str, Any]

# With tolerationSeconds 2, about 50 s without any change and then DeletionByTaintManager were seen.
NOT_READY_SECONDS = 50.0
# From the removal of a node to the end of its pods; from the source of the pod garbage collector.
GC_SECONDS = 40.0
KEY = "node.kubernetes.io/unreachable"
SILENT = {
    "type": "Ready",
    "status": "Unknown",
    "reason": "NodeStatusUnknown",
    "message": "Kubelet stopped posting node status.",
}
SOURCE = "node-controller"

RESOURCES = {"cpu": "64", "memory": "256Gi", "ephemeral-storage": "1Ti", "pods": "2000"}
EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")


@dataclass(frozen=True)
class Node:
    """A node of a stand-in.

    Pods are placed on it by their requests, selectors, node affinity and tolerations.

    Args:
        name: the node's name, also its label ``kubernetes.io/hostname``.
        labels: more labels, such as ``{"karpenter.sh/capacity-type": "spot"}``.
        taints: as kubectl writes them: ``key=value:NoSchedule`` or ``key:NoExecute``.
        resources: its resources, such as ``{"nvidia.com/gpu": "8"}``, added to 64 CPUs, 256 GiB and
            2000 pods.

    Raises:
        StandInError: a taint or a quantity that cannot be read.
    """

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: Sequence[str] = ()
    resources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value in self.resources.items():
            wrong = f"is below 0: {value!r}"
            try:
                if quantity(value) >= 0:
                    continue
            except ValueError as error:
                wrong = f"is not a quantity: {value!r}; {error}"
            raise StandInError(f"resources[{name!r}] {wrong}")
        for text in self.taints:
            _taint(text)

    def manifest(self) -> Json:
        """Return the node, ready, as an object of the API."""
        has = {**RESOURCES, **self.resources}
        taints = [_taint(text) for text in self.taints]
        names = {"kubernetes.io/hostname": self.name, "kubernetes.io/os": "linux"}
        addresses = {"InternalIP": "127.0.0.1", "Hostname": self.name}
        return {
            "metadata": {"name": self.name, "labels": {**names, **self.labels}},
            "spec": {"taints": taints} if taints else {},
            "status": {
                "capacity": has,
                "allocatable": has,
                "conditions": [READY],
                "addresses": [{"type": kind, "address": at} for kind, at in addresses.items()],
                "nodeInfo": INFO,
            },
        }


# All fields: Python clients cannot read a node that lacks one.
INFO = {
    **dict.fromkeys(("kubeProxyVersion", "kernelVersion", "machineID", "systemUUID", "bootID"), ""),
    "kubeletVersion": "v1.34.0-diloco",
    "containerRuntimeVersion": "containerd://stand-in",
    "operatingSystem": "linux",
    "osImage": "Linux",
    "architecture": "amd64",
}
READY = {
    "type": "Ready",
    "status": "True",
    "reason": "KubeletReady",
    "message": "kubelet is posting ready status",
}


def _taint(text: str) -> Json:
    what, _, effect = text.rpartition(":")
    key, _, value = what.partition("=")
    if not key or effect not in EFFECTS:
        raise StandInError(
            f"{text!r} is not a taint; write KEY=VALUE:EFFECT or KEY:EFFECT, with one of "
            f"{', '.join(EFFECTS)}"
        )
    return {"key": key, **({"value": value} if value else {}), "effect": effect}


class Nodes:
    """The nodes of a cluster, which change with the delays of a real one. Thread-safe.

    A lost node no longer answers, but its pods run on. After a while it is tainted as unreachable.
    From then on its pods are not ready, and they are deleted when they no longer tolerate the taint
    (after 300 s, unless they say otherwise). They stay until the node is found or removed.

    Attributes:
        not_ready_seconds: from the loss of a node to the taint.
        gc_seconds: from the removal of a node to the end of its pods.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.not_ready_seconds = NOT_READY_SECONDS
        self.gc_seconds = GC_SECONDS
        self._cluster = cluster
        cluster.store.listeners.append(self._heard)

    @property
    def names(self) -> list[str]:
        """Return the names of all nodes, in order."""
        with self._cluster.changed:
            return [node["metadata"]["name"] for node in self._cluster.store.list(NODES)]

    def add(self, node: Node) -> None:
        """Add a node.

        Pods are placed by its labels, taints and resources only if the stand-in was made with
        ``nodes``.

        Raises:
            ApiError: there is a node of this name.
        """
        with self._cluster.changed:
            self._cluster.add_node(node.manifest())

    def lose(self, name: str) -> None:
        """Lose a node: its kubelet does not answer from now on.

        Raises:
            LookupError: there is no such node.
        """
        with self._cluster.changed:
            self._node(name)
            self._cluster.lost.add(name)
            self._cluster.timeline.after(self.not_ready_seconds, lambda: self._unreachable(name))
            self._cluster.changed.notify_all()  # more is due now

    def found(self, name: str) -> None:
        """Let a lost node answer again: pods that were deleted meanwhile end now.

        Raises:
            LookupError: there is no such node.
        """
        with self._cluster.changed:
            node = self._node(name)
            self._cluster.lost.discard(name)
            taints = [taint for taint in node["spec"].get("taints", []) if taint["key"] != KEY]
            self._put(node, READY, taints)
            for pod in self._pods(name):
                if not _facts.condition(pod, "Ready").get("reason") and _facts.runs(pod):
                    self._cluster.put_pod(
                        _states.answering(pod, self._cluster.timeline.stamp(), yes=True)
                    )
            self._cluster.node_found(name)

    def remove(self, name: str) -> None:
        """Remove a node, as ``kubectl delete node`` does; its pods follow after ``gc_seconds``.

        Raises:
            LookupError: there is no such node.
        """
        with self._cluster.changed:
            self._node(name)
            self._cluster.store.remove(NODES, "", name)

    def _node(self, name: str) -> Json:
        node = self._cluster.store.find(NODES, "", name)
        if node is None:
            names = ", ".join(self.names) or "none"
            raise LookupError(f"there is no node {name}; there are {names}")
        return node

    def _pods(self, name: str) -> list[Json]:
        listed = self._cluster.store.list(PODS)
        return [pod for pod in listed if pod["spec"].get("nodeName") == name]

    def _put(self, node: Json, ready: Json, taints: list[Json]) -> None:
        others = [item for item in node["status"].get("conditions", []) if item["type"] != "Ready"]
        ready = {**ready, "lastTransitionTime": self._cluster.timeline.stamp()}
        spec = {key: value for key, value in node["spec"].items() if key != "taints"}
        spec |= {"taints": taints} if taints else {}
        status = {**node["status"], "conditions": [*others, ready]}
        new = {**node, "spec": spec, "status": status}
        self._cluster.store.replace(NODES, new)

    def _unreachable(self, name: str) -> None:
        node = self._cluster.store.find(NODES, "", name)
        if node is None or name not in self._cluster.lost:
            return
        now = self._cluster.timeline.stamp()
        others = [taint for taint in node["spec"].get("taints", []) if taint["key"] != KEY]
        effects = ("NoSchedule", "NoExecute")
        taints = [{"key": KEY, "effect": effect, "timeAdded": now} for effect in effects]
        self._put(node, SILENT, [*others, *taints])
        for pod in self._pods(name):
            if _facts.ended(pod):
                continue
            self._cluster.put_pod(_states.answering(pod, now, yes=False))
            words = "Node is not ready"
            self._cluster.events.say(pod, "NodeNotReady", words, source=SOURCE, warning=True)
            seconds = _scheduling.toleration_seconds(pod, taints[1])
            if seconds is not None:
                meta = pod["metadata"]
                self._cluster.timeline.after(seconds, lambda meta=meta: self._evict(name, meta))  # type: ignore[misc]

    def _evict(self, name: str, meta: Json) -> None:
        pod = self._cluster.pod(meta)
        node = self._cluster.store.find(NODES, "", name)
        taints = (node or {"spec": {}})["spec"].get("taints", [])
        if pod is None or _facts.deleting(pod) or all(taint["key"] != KEY for taint in taints):
            return
        words = f"Marking for deletion Pod {meta['namespace']}/{meta['name']}"
        source = "taint-eviction-controller"
        self._cluster.events.say(pod, "TaintManagerEviction", words, source=source)
        self._cluster.disrupt(
            pod, "DeletionByTaintManager", "Taint manager: deleting due to NoExecute taint"
        )

    def _heard(self, change: Change) -> None:
        if change.resource is NODES and change.new is None and change.old is not None:
            name = change.old["metadata"]["name"]
            self._cluster.timeline.after(self.gc_seconds, lambda: self._collect(name))

    def _collect(self, name: str) -> None:
        if self._cluster.store.find(NODES, "", name) is not None:
            return
        now = self._cluster.timeline.stamp()
        for pod in self._pods(name):
            if not _facts.ended(pod):
                pod = _states.disrupted(pod, "DeletionByPodGC", "PodGC: node no longer exists", now)
                self._cluster.put_pod(_states.with_status(pod, phase="Failed"))
            self._cluster.delete_pod(pod["metadata"]["namespace"], pod["metadata"]["name"], 0)

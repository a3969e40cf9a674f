"""A node, as a user declares it and as the API shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..._server._errors import StandInError
from .._objects._quantities import quantity

Json = dict[str, Any]

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
            try:
                amount = quantity(value)
            except ValueError as wrong:
                raise StandInError(
                    f"resources[{name!r}] is not a quantity: {value!r}; {wrong}"
                ) from None
            if amount < 0:
                raise StandInError(f"resources[{name!r}] is below 0: {value!r}")
        for text in self.taints:
            _taint(text)

    def manifest(self) -> Json:
        """Return the node, ready, as an object of the API."""
        has = {**RESOURCES, **self.resources}
        taints = [_taint(text) for text in self.taints]
        return {
            "metadata": {
                "name": self.name,
                "labels": {
                    "kubernetes.io/hostname": self.name,
                    "kubernetes.io/os": "linux",
                    **self.labels,
                },
            },
            "spec": {"taints": taints} if taints else {},
            "status": {
                "capacity": has,
                "allocatable": has,
                "conditions": [READY],
                "addresses": [
                    {"type": "InternalIP", "address": "127.0.0.1"},
                    {"type": "Hostname", "address": self.name},
                ],
                # All fields: Python clients cannot read a node that lacks one.
                "nodeInfo": {
                    "kubeletVersion": "v1.34.0-diloco",
                    "kubeProxyVersion": "",
                    "containerRuntimeVersion": "containerd://stand-in",
                    "operatingSystem": "linux",
                    "osImage": "Linux",
                    "kernelVersion": "",
                    "architecture": "amd64",
                    "machineID": "",
                    "systemUUID": "",
                    "bootID": "",
                },
            },
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

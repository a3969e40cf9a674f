"""The one node."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Json = dict[str, Any]

RESOURCES = {"cpu": "64", "memory": "256Gi", "ephemeral-storage": "1Ti", "pods": "2000"}


def node(
    name: str, resources: Mapping[str, str] | None = None, labels: Mapping[str, str] | None = None
) -> Json:
    """A node that is ready, with these resources (``RESOURCES`` if none are given) and labels."""
    has = dict(RESOURCES if resources is None else resources)
    return {
        "metadata": {
            "name": name,
            "labels": {
                "kubernetes.io/hostname": name,
                "kubernetes.io/os": "linux",
                **(labels or {}),
            },
        },
        "spec": {},
        "status": {
            "capacity": has,
            "allocatable": has,
            "conditions": [
                {
                    "type": "Ready",
                    "status": "True",
                    "reason": "KubeletReady",
                    "message": "kubelet is posting ready status",
                }
            ],
            "addresses": [
                {"type": "InternalIP", "address": "127.0.0.1"},
                {"type": "Hostname", "address": name},
            ],
            "nodeInfo": {
                "kubeletVersion": "v1.34.0-diloco",
                "operatingSystem": "linux",
                "architecture": "amd64",
            },
        },
    }

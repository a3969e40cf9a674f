"""The effects of the options on a replica's pod: mounts, topology, security, pull secrets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from . import _names as names
from ._options import EKSOptions
from ._pod_options import CODE_PATH, MOUNT

Json = dict[str, Any]

_SHM, _TMP = "/dev/shm", "/tmp"
_VOLUMES: Mapping[str, Callable[[str], Json]] = {
    "pvc": lambda name: {"persistentVolumeClaim": {"claimName": name}},
    "configmap": lambda name: {"configMap": {"name": name}},
    "secret": lambda name: {"secret": {"secretName": name}},
}
_USER = 1000
_ZONE = "topology.kubernetes.io/zone"
_HOST = "kubernetes.io/hostname"


def shape_pod(pod: Json, options: EKSOptions, labels: Mapping[str, str], gpus: int) -> None:
    """Apply the options to a pod's spec, whose first container is the replica's.

    Args:
        pod: The spec, which is changed.
        options: The executor's options.
        labels: The labels of the pods of the run.
        gpus: How many GPUs a pod has.
    """
    _mount(pod, options, gpus)
    if options.topology is not None:
        _place(pod, options.topology, {names.RUN: labels[names.RUN]})
    if options.restricted:
        _restrict(pod)


def _mount(pod: Json, options: EKSOptions, gpus: int) -> None:
    mounts = dict(options.mounts or {})
    # The processes of several GPUs talk through shared memory (NCCL), and have 64 MiB otherwise.
    if options.shm_size is not None or (gpus > 1 and _SHM not in mounts):
        size = {} if options.shm_size is None else {"sizeLimit": options.shm_size}
        _add_volume(pod, "shm", {"emptyDir": {"medium": "Memory", **size}}, _SHM)
    # The cluster refuses two volumes at one path.
    sources = list(mounts.items())
    sources += [] if options.code is None else [(CODE_PATH, f"configmap/{options.code}:ro")]
    for number, (path, source) in enumerate(sorted(sources)):
        match = MOUNT.fullmatch(source)
        assert match is not None
        volume = _VOLUMES[match["kind"]](match["name"])
        _add_volume(pod, f"mount-{number}", volume, path, read_only=bool(match["ro"]))
    if options.restricted:
        _add_volume(pod, "tmp", {"emptyDir": {}}, _TMP)


def _add_volume(pod: Json, name: str, source: Json, path: str, *, read_only: bool = False) -> None:
    mount = {"name": name, "mountPath": path} | ({"readOnly": True} if read_only else {})
    pod.setdefault("volumes", []).append({"name": name, **source})
    pod["containers"][0].setdefault("volumeMounts", []).append(mount)


def _place(pod: Json, topology: str, selector: Mapping[str, str]) -> None:
    """Place the pods near each other, or apart.

    The first pod of a required affinity to pods of its own kind is placed anywhere.
    """
    match = {"matchLabels": dict(selector)}
    if topology == "one_zone":
        pod.setdefault("affinity", {})["podAffinity"] = {
            "requiredDuringSchedulingIgnoredDuringExecution": [
                {"topologyKey": _ZONE, "labelSelector": match}
            ]
        }
        return
    pod["topologySpreadConstraints"] = [
        {
            "maxSkew": 1,
            "topologyKey": _ZONE if topology == "spread_zones" else _HOST,
            "whenUnsatisfiable": "DoNotSchedule",
            "labelSelector": match,
        }
    ]


def _restrict(pod: Json) -> None:
    """Apply the settings that the Pod Security Standard "restricted" requires.

    The runner needs nothing that they take away.

    https://kubernetes.io/docs/concepts/security/pod-security-standards/
    """
    pod["securityContext"] = {
        "runAsNonRoot": True,
        "runAsUser": _USER,
        "runAsGroup": _USER,
        "fsGroup": _USER,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    pod["containers"][0]["securityContext"] = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }

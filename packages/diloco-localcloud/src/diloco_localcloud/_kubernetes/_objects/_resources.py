"""The kinds of objects that the stand-in knows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Resource:
    """One kind of object."""

    plural: str
    kind: str
    group: str = ""
    version: str = "v1"
    namespaced: bool = True
    short: tuple[str, ...] = ()
    subresources: tuple[str, ...] = ()
    verbs: tuple[str, ...] = ("create", "delete", "get", "list", "patch", "watch")

    @property
    def api_version(self) -> str:
        """Return ``batch/v1`` or ``v1``."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def qualified(self) -> str:
        """Return ``jobs.batch``, or ``pods`` in the core group."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    @property
    def singular(self) -> str:
        """Return the kind in lower case."""
        return self.kind.lower()


ALL: list[Resource] = []


def _known(plural: str, kind: str, group: str = "", version: str = "v1", **more: Any) -> Resource:
    ALL.append(Resource(plural, kind, group, version, **more))
    return ALL[-1]


PODS = _known("pods", "Pod", short=("po",), subresources=("eviction", "exec", "log"))
JOBS = _known("jobs", "Job", "batch")
NAMESPACES = _known("namespaces", "Namespace", namespaced=False, short=("ns",))
SERVICE_ACCOUNTS = _known("serviceaccounts", "ServiceAccount", short=("sa",))
EVENTS = _known("events", "Event", short=("ev",))
NODES = _known("nodes", "Node", namespaced=False, short=("no",))
CONFIG_MAPS = _known("configmaps", "ConfigMap", short=("cm",))
SECRETS = _known("secrets", "Secret")
CLAIMS = _known("persistentvolumeclaims", "PersistentVolumeClaim", short=("pvc",))
QUOTAS = _known("resourcequotas", "ResourceQuota", short=("quota",))
LIMIT_RANGES = _known("limitranges", "LimitRange", short=("limits",))
RUNTIME_CLASSES = _known("runtimeclasses", "RuntimeClass", "node.k8s.io", namespaced=False)
PRIORITY_CLASSES = _known(
    "priorityclasses", "PriorityClass", "scheduling.k8s.io", namespaced=False, short=("pc",)
)
ACCESS_REVIEWS = _known(
    "selfsubjectaccessreviews",
    "SelfSubjectAccessReview",
    "authorization.k8s.io",
    namespaced=False,
    verbs=("create",),
)
KUEUE = "kueue.x-k8s.io"
KUEUE_VERSIONS = ("v1beta1", "v1beta2")  # a real Kueue serves one or both of them; a stand-in one
WORKLOADS = {
    version: _known("workloads", "Workload", KUEUE, version, short=("wl",))
    for version in KUEUE_VERSIONS
}
LOCAL_QUEUES = {
    version: _known("localqueues", "LocalQueue", KUEUE, version, short=("lq",))
    for version in KUEUE_VERSIONS
}


def find(group: str, version: str, plural: str) -> Resource | None:
    """Return the resource of a path; None if the stand-in has no such resource."""
    kinds = {(kind.group, kind.version, kind.plural): kind for kind in ALL}
    return kinds.get((group, version, plural))

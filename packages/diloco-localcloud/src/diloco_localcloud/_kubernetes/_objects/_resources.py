"""The kinds of objects that the stand-in knows."""

from __future__ import annotations

from dataclasses import dataclass


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


PODS = Resource("pods", "Pod", short=("po",), subresources=("eviction", "exec", "log"))
JOBS = Resource("jobs", "Job", "batch")
NAMESPACES = Resource("namespaces", "Namespace", namespaced=False, short=("ns",))
SERVICE_ACCOUNTS = Resource("serviceaccounts", "ServiceAccount", short=("sa",))
EVENTS = Resource("events", "Event", short=("ev",))
NODES = Resource("nodes", "Node", namespaced=False, short=("no",))
CONFIG_MAPS = Resource("configmaps", "ConfigMap", short=("cm",))
SECRETS = Resource("secrets", "Secret")
CLAIMS = Resource("persistentvolumeclaims", "PersistentVolumeClaim", short=("pvc",))
QUOTAS = Resource("resourcequotas", "ResourceQuota", short=("quota",))
LIMIT_RANGES = Resource("limitranges", "LimitRange", short=("limits",))
RUNTIME_CLASSES = Resource("runtimeclasses", "RuntimeClass", "node.k8s.io", namespaced=False)
PRIORITY_CLASSES = Resource(
    "priorityclasses", "PriorityClass", "scheduling.k8s.io", namespaced=False, short=("pc",)
)
ACCESS_REVIEWS = Resource(
    "selfsubjectaccessreviews",
    "SelfSubjectAccessReview",
    "authorization.k8s.io",
    namespaced=False,
    verbs=("create",),
)
KUEUE = "kueue.x-k8s.io"
KUEUE_VERSIONS = ("v1beta1", "v1beta2")  # a real Kueue serves one or both of them; a stand-in one
WORKLOADS = {
    version: Resource("workloads", "Workload", KUEUE, version, short=("wl",))
    for version in KUEUE_VERSIONS
}
LOCAL_QUEUES = {
    version: Resource("localqueues", "LocalQueue", KUEUE, version, short=("lq",))
    for version in KUEUE_VERSIONS
}

ALL = (
    PODS,
    JOBS,
    NAMESPACES,
    SERVICE_ACCOUNTS,
    EVENTS,
    NODES,
    CONFIG_MAPS,
    SECRETS,
    CLAIMS,
    QUOTAS,
    LIMIT_RANGES,
    RUNTIME_CLASSES,
    PRIORITY_CLASSES,
    ACCESS_REVIEWS,
    *WORKLOADS.values(),
    *LOCAL_QUEUES.values(),
)


def find(group: str, version: str, plural: str) -> Resource | None:
    """Return the resource of a path; None if the stand-in has no such resource."""
    for resource in ALL:
        if (resource.group, resource.version, resource.plural) == (group, version, plural):
            return resource
    return None

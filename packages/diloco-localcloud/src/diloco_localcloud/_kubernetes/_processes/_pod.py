"""One pod that runs as processes."""

from __future__ import annotations

import signal
from typing import Any

from .._pods import _facts
from ._kubelet import ProcessKubelet

Json = dict[str, Any]


class LocalPod:
    """One pod, on which a test may act behind the API's back. Thread-safe."""

    def __init__(self, kubelet: ProcessKubelet, meta: Json) -> None:
        self._kubelet = kubelet
        self._cluster = kubelet.cluster
        self._meta = meta

    @property
    def name(self) -> str:
        """Return its name."""
        return str(self._meta["name"])

    @property
    def index(self) -> int | None:
        """Return its completion index; None if it has none."""
        return _facts.index_of({"metadata": self._meta})

    @property
    def json(self) -> Json | None:
        """Return the pod as stored, which must not be changed; None if it is gone."""
        with self._cluster.changed:
            return self._cluster.pod(self._meta)

    @property
    def pids(self) -> list[int]:
        """Return the process IDs of the first processes of its running containers."""
        with self._cluster.changed:
            sandbox = self._kubelet.sandbox(str(self._meta["uid"]))
            containers = list(sandbox.containers.values()) if sandbox else []
        return [container.pid for container in containers if container.pid is not None]

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the first process of each of its containers."""
        with self._cluster.changed:
            self._kubelet.send(self._meta, number)

    def kill(self) -> None:
        """Send SIGKILL, as the kernel or a user would: exit code 137."""
        self.send(signal.SIGKILL)

    def evict(self) -> None:
        """Evict it by the eviction API, as a node drain does.

        It is marked with DisruptionTarget, and gets SIGTERM and, after its grace, SIGKILL.

        Raises:
            LookupError: it is gone.
        """
        self._disrupt("EvictionByEvictionAPI", "Eviction API: evicting")

    def _disrupt(self, reason: str, message: str) -> None:
        with self._cluster.changed:
            pod = self.json
            if pod is None:
                raise LookupError(f"pod {self._meta['namespace']}/{self.name} is gone")
            self._cluster.disrupt(pod, reason, message)


class LocalPods:
    """The pods that run as processes. Thread-safe."""

    def __init__(self, kubelet: ProcessKubelet) -> None:
        self._kubelet = kubelet
        self._cluster = kubelet.cluster

    def job(self, name: str, namespace: str = "default") -> Json:
        """Return the Job as stored, which must not be changed.

        Raises:
            LookupError: there is no such object.
        """
        return self._cluster.job(namespace, name)

    def of(self, job: str, namespace: str = "default") -> list[LocalPod]:
        """Return the pods of a Job by name, by index and then age."""
        return [
            LocalPod(self._kubelet, pod["metadata"])
            for pod in self._cluster.pods_of(namespace, job)
        ]

    def newest(self, job: str, index: int, namespace: str = "default") -> LocalPod:
        """Return the newest pod of an index.

        Raises:
            LookupError: there is no such object.
        """
        candidates = [pod for pod in self.of(job, namespace) if pod.index == index]
        if not candidates:
            raise LookupError(f"Job {namespace}/{job} has no pod of index {index}")
        return candidates[-1]

    def wait_for(self, test: Any, seconds: float = 30.0) -> None:
        """Wait until ``test()`` is true; it is called again whenever the cluster changes.

        Raises:
            TimeoutError: it was not true within ``seconds``.
        """
        with self._cluster.changed:
            if not self._cluster.changed.wait_for(test, seconds):
                raise TimeoutError(f"it did not happen within {seconds} s")

"""The scripted world: pods do what the test says, when the test says it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..._server._timeline import Clock
from .._control._cluster import Cluster
from .._control._images import Images
from .._control._kueue import Kueue
from .._pods._scheduling import Filter
from ._kubelet import Habits, ScriptedKubelet
from ._pod import ScriptedPod

Json = dict[str, Any]


class World(Habits, Clock):
    """Moves pods and the clock behind the API's back.

    Nothing happens by itself: a pod is given a node and then waits (``ContainerCreating``) until it
    is started. The cluster's reactions, with their delays, happen as ``advance``, ``settle`` or
    ``step`` move the clock.

    See ``Habits`` for its attributes. Thread-safe.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        images: Images,
        filters: Sequence[Filter] = (),
        kueue: str | None = None,
    ) -> None:
        Habits.__init__(self)
        Clock.__init__(self, cluster.timeline, cluster.changed)
        self._kueue = Kueue(cluster, kueue) if kueue else None
        self._cluster = cluster
        self._kubelet = ScriptedKubelet(cluster, self, images, filters)

    # -- Kueue
    # ----------------------------------------------------------------------------------------------

    def add_queue(self, name: str, namespace: str = "default") -> None:
        """Add a LocalQueue. Jobs of missing queues wait for ever, unless ``admit`` is called.

        Raises:
            LookupError: there is no Kueue.
        """
        with self._cluster.changed:
            self._with_kueue().add_queue(name, namespace)

    def admit(self, job: str, namespace: str = "default") -> None:
        """Let Kueue have room for a queued Job, which is resumed as soon as Kueue looks.

        Raises:
            LookupError: there is no such Job, it is not queued, or there is no Kueue.
        """
        with self._cluster.changed:
            self._with_kueue().admit(self.job(job, namespace))

    def preempt(self, job: str, namespace: str = "default") -> None:
        """Let Kueue take the room of an admitted Job, which is suspended and queued again.

        Raises:
            LookupError: there is no such Job, it is not admitted, or there is no Kueue.
        """
        with self._cluster.changed:
            self._with_kueue().preempt(self.job(job, namespace))

    def _with_kueue(self) -> Kueue:
        if self._kueue is None:
            raise LookupError("there is no Kueue; make the stand-in with kueue=True")
        return self._kueue

    # -- the objects
    # ----------------------------------------------------------------------------------------------

    def job(self, name: str, namespace: str = "default") -> Json:
        """Return the Job as stored, which must not be changed.

        Raises:
            LookupError: there is no such Job.
        """
        return self._cluster.job(namespace, name)

    def pods(self, job: str | None = None, namespace: str = "default") -> list[ScriptedPod]:
        """Return all pods, or a Job's, by index and then age; deleting and ended ones too."""
        return [
            ScriptedPod(self._kubelet, pod["metadata"])
            for pod in self._cluster.pods_of(namespace, job)
        ]

    def pod(self, job: str, index: int, namespace: str = "default") -> ScriptedPod:
        """Return the newest pod of an index.

        Raises:
            LookupError: there is no such pod, perhaps not yet: the controller makes the first ones
                0.1 s after the create.
        """
        candidates = [pod for pod in self.pods(job, namespace) if pod.index == index]
        if not candidates:
            raise LookupError(
                f"Job {namespace}/{job} has no pod of index {index}; it may need world.settle() "
                "first"
            )
        return candidates[-1]

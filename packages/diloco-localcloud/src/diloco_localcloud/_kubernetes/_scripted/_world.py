"""The scripted world: pods do what the test says, when the test says it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .._control._kueue import Kueue
from ._kubelet import Habits, ScriptedKubelet
from ._pod import ScriptedPod

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .._control._cluster import Cluster
    from .._control._images import Images
    from .._pods._scheduling import Filter

Json = dict[str, Any]


class World(Habits):
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
        super().__init__()
        self._kueue = Kueue(cluster, kueue) if kueue else None
        self._cluster = cluster
        self._kubelet = ScriptedKubelet(cluster, self, images, filters)

    # -- the clock
    # ----------------------------------------------------------------------------------------------

    def now(self) -> float:
        """Return the time of the cluster's clock, in seconds since the epoch."""
        with self._cluster.changed:
            return self._cluster.timeline.now()

    def advance(self, seconds: float) -> None:
        """Let ``seconds`` pass, and do whatever falls due meanwhile."""
        with self._cluster.changed:
            self._cluster.timeline.run_until(self._cluster.timeline.now() + seconds)
            self._cluster.changed.notify_all()

    def settle(self, within: float = 2.0, most: float = 600.0) -> None:
        """Let time pass until nothing is due within the next ``within`` seconds.

        At most ``most`` seconds pass in all. The usual delays and short graces are shorter than the
        default, and back-offs (10 s and more) are longer.
        """
        with self._cluster.changed:
            timeline = self._cluster.timeline
            end = timeline.now() + most
            while (due := timeline.next_due()) is not None and due <= min(
                timeline.now() + within, end
            ):
                timeline.run_until(due)
            self._cluster.changed.notify_all()

    def step(self) -> bool:
        """Do the next thing that is due, however late; return False if nothing is due at all."""
        with self._cluster.changed:
            return self._cluster.timeline.step()

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

"""The scripted world: pods do what the test says, when the test says it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..._server._timeline import Clock
from .._control._cluster import Cluster
from .._control._images import Images
from .._control._kueue import Kueue
from .._pods import _facts, _states
from .._pods._scheduling import Filter
from ._kubelet import Habits, ScriptedKubelet

Json = dict[str, Any]

_PULL = (
    'failed to pull and unpack image "{0}": failed to resolve reference "{0}": '
    'failed to do request: Head "https://{0}": '
    "dial tcp: lookup failed: no such host"
)


class ScriptedPod:
    """A pod that a test moves; every method works on the pod as it is now.

    Raises (all methods):
        LookupError: the pod is gone.

    Thread-safe.
    """

    def __init__(self, kubelet: ScriptedKubelet, meta: Json) -> None:
        self._kubelet = kubelet
        self._meta = meta
        self._cluster = kubelet.cluster

    @property
    def name(self) -> str:
        """Return its name."""
        return str(self._meta["name"])

    @property
    def uid(self) -> str:
        """Return its uid."""
        return str(self._meta["uid"])

    @property
    def index(self) -> int | None:
        """Return its completion index; None if it has none."""
        return _facts.index_of({"metadata": self._meta})

    @property
    def exists(self) -> bool:
        """Return whether it is still in the API."""
        with self._cluster.changed:
            return self._cluster.pod(self._meta) is not None

    @property
    def json(self) -> Json:
        """Return the pod as stored, which must not be changed."""
        with self._kubelet.at(self._meta) as pod:
            return pod

    @property
    def alive(self) -> bool:
        """Return whether one of its containers runs."""
        if not self.exists:
            return False
        states = [entry["state"] for entry in self.json["status"].get("containerStatuses", [])]
        return any("running" in state for state in states)

    def start(self) -> None:
        """Make its containers run from now on, and be ready; do nothing if they do or did.

        Raises:
            ValueError: nodes are declared, and it is on none of them; or a volume is made of
                a ConfigMap, a Secret or a key that is missing.
        """
        with self._kubelet.at(self._meta) as pod:
            if _facts.phase(pod) == "Pending" and not _facts.terminations(pod):
                self._cluster.put_pod(self._kubelet.started(pod))

    def succeed(self, message: str = "") -> None:
        """Exit with code 0 now; ``message`` is the termination message."""
        with self._kubelet.at(self._meta) as pod:
            self._kubelet.end(pod, 0, message=message)

    def fail(
        self,
        exit_code: int = 1,
        message: str = "",
        *,
        reason: str = "Error",
        signal: int | None = None,
    ) -> None:
        """Exit with ``exit_code`` now; ``message`` is the termination message."""
        with self._kubelet.at(self._meta) as pod:
            self._kubelet.end(pod, exit_code, reason=reason, message=message, signal=signal)

    def oom(self) -> None:
        """Kill it as the kernel does at its memory limit."""
        self.fail(137, reason="OOMKilled")

    def start_error(
        self, message: str = 'exec: "nope": executable file not found in $PATH: unknown'
    ) -> None:
        """End it because the command cannot be started."""
        words = "failed to create containerd task: failed to create shim task"
        self.fail(128, f"{words}: OCI runtime create failed: {message}", reason="StartError")

    def image_error(self, reason: str = "ImagePullBackOff", message: str | None = None) -> None:
        """Make the pull of its image fail.

        It waits with ``ErrImagePull``, ``ImagePullBackOff`` or ``InvalidImageName``.
        """
        name = self.json["spec"]["containers"][0].get("image", "")
        text = _PULL.format(name)
        if reason == "ImagePullBackOff":
            text = f'Back-off pulling image "{name}": ErrImagePull: {text}'
        self.wait_with(reason, text if message is None else message)

    def wait_with(self, reason: str, message: str = "") -> None:
        """Make it wait with a reason, such as ``CreateContainerConfigError``."""
        with self._kubelet.at(self._meta) as pod:
            now = self._cluster.timeline.stamp()
            if "nodeName" not in pod["spec"]:
                pod = _states.bound(pod, self._kubelet.scheduler.node_for(pod), now)
            self._cluster.put_pod(_states.waiting(pod, reason, message, now))
            self._cluster.events.say(pod, "Failed", f"Error: {reason}", warning=True)

    def warn(self, reason: str, message: str, source: str = "kubelet") -> None:
        """Add an event of type Warning about it, such as FailedMount; a repeated one counts up."""
        with self._kubelet.at(self._meta) as pod:
            self._cluster.events.say(pod, reason, message, source=source, warning=True)

    def disrupt(self, reason: str = "PreemptionByScheduler", message: str = "") -> None:
        """Mark it with DisruptionTarget and delete it: preempted, tainted, evicted by the API."""
        with self._kubelet.at(self._meta) as pod:
            message = message or f"{pod['spec'].get('nodeName')}: {reason}"
            self._cluster.disrupt(pod, reason, message)

    def evict(self) -> None:
        """Evict it by the eviction API, as a node drain does."""
        self.disrupt("EvictionByEvictionAPI", "Eviction API: evicting")

    def lose(self) -> None:
        """Lose its node: the pod is deleted, but never ends, until ``found``."""
        with self._kubelet.at(self._meta) as pod:
            self._kubelet.script(pod).stuck = True
            self._cluster.put_pod(_states.answering(pod, self._cluster.timeline.stamp(), yes=False))
        self.disrupt("DeletionByTaintManager", "Taint manager: deleting due to NoExecute taint")

    def found(self) -> None:
        """Bring its node back, which ends the pod if it was deleted."""
        with self._kubelet.at(self._meta) as pod:
            self._kubelet.script(pod).stuck = False
            if _facts.deleting(pod):
                self._kubelet.deleting(pod)

    def on_term(self, exit_code: int = 143, after: float = 0.5) -> None:
        """Set how it answers SIGTERM; if that takes longer than its grace, it is killed."""
        with self._kubelet.at(self._meta) as pod:
            script = self._kubelet.script(pod)
            script.term_code, script.term_seconds, script.ignores_term = exit_code, after, False

    def ignore_term(self) -> None:
        """Make it ignore SIGTERM, so that it is killed at the end of its grace with 137."""
        with self._kubelet.at(self._meta) as pod:
            self._kubelet.script(pod).ignores_term = True

    def delete(self) -> None:
        """Delete it, as ``kubectl delete pod`` does."""
        with self._kubelet.at(self._meta):
            self._cluster.delete_pod(self._meta["namespace"], self.name)

    def log(self, text: str | bytes, container: str | None = None) -> None:
        """Write to its log, now; lines end with a newline."""
        with self._kubelet.at(self._meta) as pod:
            name = container or pod["spec"]["containers"][0]["name"]
            self._kubelet.log_of(pod, name).write(self._cluster.timeline.now(), text)
            self._cluster.changed.notify_all()


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

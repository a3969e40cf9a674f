"""The kubelet of the scripted world: it runs no processes, and does what a test says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from .._control import _content
from .._control._cluster import Cluster
from .._control._delays import Delay
from .._control._images import PULL_REASONS, Images
from .._control._runtime import Log
from .._control._scheduler import Scheduler
from .._objects import _refusals
from .._objects._resources import PODS
from .._pods import _facts, _states
from .._pods._scheduling import Filter

Json = dict[str, Any]

PULL = Delay(0.05, 0.0, 0.5)  # from a node's assignment to the kubelet's first look
PHASE = Delay(1.1, 0.3, 1.9)  # from the end of the last container to the phase
REMOVE = Delay(0.3, 0.1, 1.5)  # from the end of a deleted pod's containers to its removal

# From the kubelet's source: the seconds between two looks at volumes that lack something; doubled
# each time.
MOUNT_SECONDS, LONGEST_MOUNT_SECONDS = 0.5, 122.0


class Habits:
    """The behaviour of pods when the test says nothing.

    Attributes:
        auto_start: seconds from ``ContainerCreating`` to running; None (the default) leaves the
            start to the test.
        schedulable: whether pods are given a node; if False they stay Pending, with ``why_not`` as
            the scheduler's message.
        term_seconds: how long a container takes to end after SIGTERM.
        term_code: the exit code with which it then ends.
    """

    def __init__(self) -> None:
        self.auto_start: float | None = None
        self.schedulable = True
        self.why_not = "0/1 nodes are available: 1 Insufficient nvidia.com/gpu."
        self.term_seconds = 0.5
        self.term_code = 143


@dataclass
class Script:
    """The instructions of the test for one pod."""

    term_seconds: float | None = None  # None: the world's own
    term_code: int | None = None
    ignores_term: bool = False
    stuck: bool = False  # its node is lost
    logs: dict[str, Log] = field(default_factory=dict)


class ScriptedKubelet:
    """Moves pods as it is told to; all methods but ``at`` run under the cluster's lock."""

    def __init__(
        self, cluster: Cluster, habits: Habits, images: Images, filters: Sequence[Filter]
    ) -> None:
        self.cluster = cluster
        self.habits = habits
        self.images = images
        self.scheduler = Scheduler(
            cluster,
            filters,
            self._bound,
            held=lambda: None if habits.schedulable else habits.why_not,
        )
        self._scripts: dict[str, Script] = {}
        cluster.runtime = self
        cluster.node_found = self.found

    @contextmanager
    def at(self, meta: Json) -> Iterator[Json]:
        """Yield the pod as it is now, with the lock held."""
        with self.cluster.changed:
            pod = self.cluster.pod(meta)
            if pod is None:
                raise LookupError(f"pod {meta['namespace']}/{meta['name']} is gone")
            yield pod

    def script(self, pod: Json) -> Script:
        """Return the instructions for a pod."""
        return self._scripts.setdefault(pod["metadata"]["uid"], Script())

    def log_of(self, pod: Json, container: str) -> Log:
        """Return the log of a container; under the lock."""
        return self.script(pod).logs.setdefault(container, Log())

    def end(self, pod: Json, code: int, **why: Any) -> None:
        """End all its containers now; the phase follows."""
        now = self.cluster.timeline.stamp()
        if _facts.ended(pod):
            raise ValueError(
                f"pod {pod['metadata']['name']} has ended already: {_facts.phase(pod)}"
            )
        if not pod["status"].get("containerStatuses") or _facts.phase(pod) == "Pending":
            pod = self.started(pod)
        for container in pod["spec"]["containers"]:
            pod = _states.terminated(pod, container["name"], code, now, **why)
            self.log_of(pod, container["name"]).ended = True
        self.cluster.put_pod(pod)
        meta = pod["metadata"]
        self.cluster.timeline.after(self.cluster.delays.of(PHASE), lambda: self._ended(meta))

    def _ended(self, meta: Json) -> None:
        pod = self.cluster.pod(meta)
        if pod is None or _facts.ended(pod) or self.cluster.out_of_reach(pod):
            return
        if len(_facts.terminations(pod)) == len(pod["spec"]["containers"]):
            self.cluster.put_pod(_states.ended(pod, self.cluster.timeline.stamp()))
            if _facts.deleting(pod):
                self.cluster.gone(pod)

    def started(self, pod: Json) -> Json:
        """Return the pod with its containers running.

        Raises:
            ValueError: it is on no node, or its volumes lack a ConfigMap, a Secret or a key.
        """
        try:
            _content.files(self.cluster.store, pod)
        except _content.MountError as wrong:
            raise ValueError(f"pod {pod['metadata']['name']} cannot start: {wrong}") from None
        return self._running(pod)

    def _running(self, pod: Json) -> Json:
        now = self.cluster.timeline.stamp()
        if "nodeName" not in pod["spec"]:
            pod = _states.bound(pod, self.scheduler.node_for(pod), now)
        pod = _states.running(_states.waiting(pod, "ContainerCreating", "", now), now)
        self.cluster.events.say(pod, "Started", "Started container")
        return pod

    def added(self, pod: Json) -> None:
        """Find a node for a new pod."""
        self.scheduler.add(pod)

    def found(self, node: str) -> None:
        """Go on with the pods of a node that answers again."""
        for pod in self.cluster.store.list(PODS):
            if pod["spec"].get("nodeName") != node:
                continue
            if _facts.deleting(pod):
                self.deleting(pod)
            elif _facts.terminations(pod):
                self._ended(pod["metadata"])
            else:
                self._bound(pod)

    def _bound(self, pod: Json) -> None:
        meta = pod["metadata"]
        self.cluster.timeline.after(
            self.cluster.delays.of(PULL),
            lambda: self.images.pull(meta, lambda: self._prepare(meta)),
        )

    def _prepare(self, meta: Json) -> None:
        pod = self.cluster.pod(meta)
        if pod is None or _facts.deleting(pod) or not _unprepared(pod):
            return
        self.cluster.put_pod(
            _states.waiting(pod, "ContainerCreating", "", self.cluster.timeline.stamp())
        )
        self._mount(meta, MOUNT_SECONDS)

    def _mount(self, meta: Json, wait: float) -> None:
        """Look for the sources of its volumes until all exist; then it may start by itself."""
        pod = self.cluster.pod(meta)
        if pod is None or _facts.deleting(pod) or _facts.phase(pod) != "Pending":
            return
        try:
            _content.files(self.cluster.store, pod)
        except _content.MountError as wrong:
            if not self.cluster.out_of_reach(pod):
                words = str(wrong)
                self.cluster.events.say(pod, "FailedMount", words, warning=True)
            longer = min(2 * wait, LONGEST_MOUNT_SECONDS)
            self.cluster.timeline.after(wait, lambda: self._mount(meta, longer))
            return
        if self.habits.auto_start is not None:
            self.cluster.timeline.after(self.habits.auto_start, lambda: self._auto_start(meta))

    def _auto_start(self, meta: Json) -> None:
        pod = self.cluster.pod(meta)
        if pod is None or self.cluster.out_of_reach(pod):
            return
        if _facts.phase(pod) == "Pending" and not _facts.deleting(pod):
            self.cluster.put_pod(self._running(pod))  # its volumes exist, since they were mounted

    def deleting(self, pod: Json) -> None:
        """Send a deleted pod SIGTERM now, and SIGKILL at the end of its grace."""
        meta, script = pod["metadata"], self.script(pod)
        if script.stuck or self.cluster.out_of_reach(pod):
            return
        grace, habits = float(meta["deletionGracePeriodSeconds"]), self.habits
        seconds = habits.term_seconds if script.term_seconds is None else script.term_seconds
        code = habits.term_code if script.term_code is None else script.term_code
        if script.ignores_term or seconds > grace:
            seconds, code = grace, 137
        self.cluster.events.say(pod, "Killing", "Stopping container")
        self.cluster.timeline.after(seconds, lambda: self._killed(meta, code))

    def _killed(self, meta: Json, code: int) -> None:
        pod = self.cluster.pod(meta)
        if pod is None or self.script(pod).stuck or self.cluster.out_of_reach(pod):
            return
        now = self.cluster.timeline.stamp()
        if not _facts.ended(pod):
            for container in pod["spec"]["containers"]:
                state = _facts.container_status(pod, container["name"]).get("state", {})
                if "running" in state:
                    pod = _states.terminated(pod, container["name"], code, now)
                elif "terminated" not in state:  # it never ran: the kubelet has nothing to stop
                    pod = _states.never_made(pod, container["name"], now)
                self.log_of(pod, container["name"]).ended = True
            self.cluster.put_pod(pod)
        self.cluster.timeline.after(self.cluster.delays.of(REMOVE), lambda: self._remove(meta))

    def _remove(self, meta: Json) -> None:
        pod = self.cluster.pod(meta)
        if pod is None or self.cluster.out_of_reach(pod):
            return
        if not _facts.ended(pod):
            pod = _states.ended(pod, self.cluster.timeline.stamp())
            self.cluster.put_pod(pod)
        self.cluster.gone(pod)

    def execute(self, *_: Any) -> None:
        """Refuse, since these pods run no processes; see ``Runtime``."""
        raise _refusals.bad_request(
            "the pods of this stand-in are scripted, so exec finds no process; KubernetesProcesses "
            "has them"
        )

    def removed(self, pod: Json) -> None:
        """End the logs of a pod that is out of the store."""
        script = self._scripts.pop(pod["metadata"]["uid"], None)
        for log in script.logs.values() if script else ():
            log.ended = True


def _unprepared(pod: Json) -> bool:
    """Return whether no container was made: none was tried, or its image could not be pulled."""
    statuses = pod["status"].get("containerStatuses") or []
    return all(
        entry["state"].get("waiting", {}).get("reason") in PULL_REASONS for entry in statuses
    )

"""A kubelet that runs containers as processes of this machine."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .._control._cluster import Cluster
from .._control._content import ConfigError, MountError
from .._control._delays import Delay
from .._control._images import Images
from .._control._runtime import Log
from .._control._scheduler import Scheduler
from .._pods import _facts, _states
from .._pods._scheduling import Filter
from ._sandbox import Sandbox

Json = dict[str, Any]

START = Delay(0.01, 0.0, 0.5)  # from a node's assignment to the first pull
HEARD = Delay(0.0, 0.1, 0.9)  # from the end of a container to its state
PHASE = Delay(0.0, 0.4, 1.0)  # from that state to the phase
REMOVE = Delay(0.0, 0.1, 1.0)  # from the phase to the last delete
AGAIN_SECONDS = 1.0  # between tries to make a container whose configuration is missing
FORCED_SECONDS = 2.0  # from SIGTERM to SIGKILL for a pod whose delete was forced
ADDRESS = "127.0.0.1"
NO_LOG = Log()  # of a container that was never started
NO_LOG.ended = True


class ProcessKubelet:
    """The kubelet of all nodes. Methods run under the cluster's lock, except ``close``."""

    def __init__(
        self,
        cluster: Cluster,
        images: Images,
        filters: Sequence[Filter],
        folder: Path,
        base: Mapping[str, str],
    ) -> None:
        self.cluster = cluster
        self._images = images
        self._scheduler = Scheduler(cluster, filters, self._bound)
        self._folder = folder
        self._base = dict(base)
        self._pods: dict[str, Sandbox] = {}
        self._closed = False
        cluster.runtime = self

    # -- called by the cluster
    # ----------------------------------------------------------------------------------------

    def added(self, pod: Json) -> None:
        """Find a node for a new pod."""
        self._scheduler.add(pod)

    def deleting(self, pod: Json) -> None:
        """Send a deleted pod SIGTERM now, and SIGKILL at the end of its grace."""
        meta = pod["metadata"]
        sandbox = self._pods.get(meta["uid"])
        self.cluster.events.say(pod, "Killing", "Stopping containers")
        grace = float(meta["deletionGracePeriodSeconds"])
        if sandbox is None or not sandbox.containers:
            if sandbox is None or not sandbox.telling:  # otherwise its end is on the way
                self._finish(meta)
            return
        for container in sandbox.containers.values():
            container.term()
        self.cluster.timeline.after(grace, lambda: self._kill(meta["uid"]))

    def removed(self, pod: Json) -> None:
        """End the processes that a pod still has when it is out of the store (a forced delete)."""
        uid = pod["metadata"]["uid"]
        sandbox = self._pods.get(uid)
        if sandbox is None:
            return
        for container in sandbox.containers.values():
            container.term()
        if sandbox.containers:
            self.cluster.timeline.after(FORCED_SECONDS, lambda: self._kill(uid))
        else:
            del self._pods[uid]
            sandbox.remove()

    def log_of(self, pod: Json, container: str) -> Log:
        """Return the log of a container."""
        sandbox = self._pods.get(pod["metadata"]["uid"])
        return sandbox.logs.get(container, NO_LOG) if sandbox else NO_LOG

    def execute(
        self,
        pod: Json,
        container: str,
        command: Sequence[str],
        streams: Sequence[int],
        tell: Callable[[Json], None],
    ) -> Callable[[], None] | None:
        """Start a command in a container.

        It has the container's environment and folder, and ends with the container.
        """
        sandbox = self._pods.get(pod["metadata"]["uid"])
        if sandbox is None or container not in sandbox.containers or self._closed:
            return None
        started = sandbox.beside.setdefault(container, set())

        def heard(event: Json) -> None:
            if event["event"] != "started":
                with self.cluster.changed:  # waits until the process is in the set
                    started.discard(process)
                tell(event)

        process = sandbox.execute(container, command, streams, heard)
        started.add(process)
        return process.kill

    # -- called by the stand-in and its tests
    # ----------------------------------------------------------------------------------------------

    def sandbox(self, uid: str) -> Sandbox | None:
        """Return the folder and containers of a pod; None if it has none."""
        return self._pods.get(uid)

    def close(self) -> None:
        """End every process, and start none any more; called without the lock."""
        with self.cluster.changed:
            self._closed = True
            left = [
                container
                for sandbox in self._pods.values()
                for container in [*sandbox.containers.values(), *sandbox.all_beside()]
            ]
        for container in left:
            container.kill()
        for container in left:
            container.join()

    def _kill(self, uid: str) -> None:
        sandbox = self._pods.get(uid)
        for container in sandbox.containers.values() if sandbox else ():
            container.kill()

    # -- the life of a pod
    # ----------------------------------------------------------------------------------------------

    def _bound(self, pod: Json) -> None:
        """Prepare a pod that was given a node."""
        meta = pod["metadata"]
        if meta["uid"] in self._pods:
            return
        now = self.cluster.timeline.stamp()
        self.cluster.put_pod(_states.waiting(pod, "ContainerCreating", "", now))
        self.cluster.timeline.after(
            self.cluster.delays.of(START),
            lambda: self._images.pull(meta, lambda: self._start(meta)),
        )

    def _start(self, meta: Json) -> None:
        pod = self.cluster.pod(meta)
        if pod is None or self._closed or _facts.deleting(pod) or _facts.ended(pod):
            return
        folder = self._folder / f"{meta['namespace']}_{meta['name']}_{meta['uid']}"
        sandbox = self._pods.setdefault(
            meta["uid"], Sandbox(self.cluster.store, folder, self._base)
        )
        try:
            if pod["spec"].get("initContainers"):
                raise ConfigError(
                    "the stand-in runs no init containers; do their work in the main container"
                )
            for container in pod["spec"]["containers"]:
                if container["name"] not in sandbox.containers:
                    self._run(pod, sandbox, container)
            self.cluster.put_pod(_states.running(pod, self.cluster.timeline.stamp(), ADDRESS))
        except ConfigError as wrong:
            reason, words = "FailedMount", str(wrong)
            if not isinstance(wrong, MountError):
                now = self.cluster.timeline.stamp()
                config = "CreateContainerConfigError"
                self.cluster.put_pod(_states.waiting(pod, config, words, now))
                reason, words = "Failed", f"Error: {wrong}"
            self.cluster.events.say(pod, reason, words, warning=True)
            self.cluster.timeline.after(AGAIN_SECONDS, lambda: self._start(meta))

    def _run(self, pod: Json, sandbox: Sandbox, container: Json) -> None:
        def told(event: Json) -> None:
            with self.cluster.changed:
                self._heard(pod["metadata"], container, event)
                self.cluster.changed.notify_all()

        if not sandbox.start(pod, container, told, self._write):
            refused = {"event": "refused", "message": "no command specified"}
            self.cluster.timeline.after(0.0, lambda: told(refused))

    def _write(self, log: Log, text: bytes) -> None:
        with self.cluster.changed:
            log.write(self.cluster.timeline.now(), text)

    def _heard(self, meta: Json, container: Json, event: Json) -> None:
        """Record that a container was started, refused, or has ended; called from its thread."""
        pod, sandbox, name = self.cluster.pod(meta), self._pods.get(meta["uid"]), container["name"]
        if event["event"] == "started":
            if pod is not None:
                self.cluster.events.say(pod, "Started", f"Started container {name}")
            return
        if sandbox is None:
            return
        sandbox.containers.pop(name, None)
        for command in sandbox.beside.pop(name, ()):
            command.kill()
        sandbox.logs[name].ended = True
        sandbox.telling += 1
        event = {**event, "at": self.cluster.timeline.stamp()}
        self.cluster.soon(HEARD, lambda: self._tell(meta, container, event))

    def _tell(self, meta: Json, container: Json, event: Json) -> None:
        """Write into the status how a container has ended."""
        pod, sandbox, name = self.cluster.pod(meta), self._pods.get(meta["uid"]), container["name"]
        if sandbox is None:
            return
        sandbox.telling -= 1
        if pod is None or _facts.ended(pod):
            if pod is None and not sandbox.containers and not sandbox.telling:
                del self._pods[meta["uid"]]
                sandbox.remove()
            return
        if event["event"] == "refused":
            code, reason = 128, "StartError"
            message = (
                "failed to create containerd task: failed to create shim task: "
                f"OCI runtime create failed: {event['message']}"
            )
        else:
            code, reason = int(event["code"]), "OOMKilled" if event["oom"] else ""
            message = sandbox.message(container, failed=code != 0)
        pod = _states.terminated(pod, name, code, event["at"], reason=reason, message=message)
        self.cluster.put_pod(pod)
        if not sandbox.containers and not sandbox.telling:
            self.cluster.soon(PHASE, lambda: self._finish(meta))

    def _finish(self, meta: Json) -> None:
        pod = self.cluster.pod(meta)
        if pod is None:
            return
        now = self.cluster.timeline.stamp()
        for container in pod["spec"]["containers"]:
            if "terminated" not in _facts.container_status(pod, container["name"]).get("state", {}):
                pod = _states.never_made(pod, container["name"], now)
        if not _facts.ended(pod):
            self.cluster.put_pod(_states.ended(pod, now))
        if _facts.deleting(pod):
            self.cluster.soon(REMOVE, lambda: self.cluster.gone(pod))

    def send(self, meta: Json, number: signal.Signals) -> None:
        """Send a signal to the first process of each of a pod's containers."""
        sandbox = self._pods.get(meta["uid"])
        for container in sandbox.containers.values() if sandbox else ():
            container.send(number)

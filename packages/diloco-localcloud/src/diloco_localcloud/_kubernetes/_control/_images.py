"""Images whose pull fails when a test says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .._pods import _facts, _states
from ._cluster import Cluster

Json = dict[str, Any]

# From the kubelet's source; ErrImagePull, ImagePullBackOff and ErrImagePull again after about
# 14 s were seen.
BACK_OFF_SECONDS = 1.0  # from a failed pull to the kubelet's next look
FIRST_SECONDS, LONGEST_SECONDS = 10.0, 300.0  # between two pulls; doubled each time

PULL_REASONS = ("ErrImagePull", "ImagePullBackOff")

NOT_FOUND = (
    'rpc error: code = NotFound desc = failed to pull and unpack image "{0}": '
    'failed to resolve reference "{0}": {0}: not found'
)


class Images:
    """The images of a cluster: all can be pulled, except the refused ones. Thread-safe.

    Attributes:
        first_seconds: from the first pull that fails to the next one; doubled each time, up to five
            minutes.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.first_seconds = FIRST_SECONDS
        self._cluster = cluster
        self._refused: dict[str, str] = {}

    def refuse(self, image: str, message: str = NOT_FOUND) -> None:
        """Make every pull of an image fail from now on; ``{0}`` in the message is its name."""
        with self._cluster.changed:
            self._refused[image] = message.replace("{0}", image)

    def allow(self, image: str) -> None:
        """Take a ``refuse`` back: the next pull of a waiting pod succeeds."""
        with self._cluster.changed:
            self._refused.pop(image, None)

    def pull(self, meta: Json, pulled: Callable[[], None], wait: float = 0.0) -> None:
        """Pull the images of a pod, trying again as a kubelet does, and then call ``pulled``.

        Called under the cluster's lock.
        """
        pod = self._waiting(meta)
        if pod is None:
            return
        names = [container.get("image", "") for container in pod["spec"]["containers"]]
        image = next((name for name in names if name in self._refused), None)
        if image is None:
            pulled()
            return
        why = self._refused[image]
        words = f'Failed to pull image "{image}": {why}'
        self._cluster.events.say(pod, "Failed", words, warning=True)
        self._show(pod, PULL_REASONS[0], why)

        def back_off() -> None:
            pod = self._waiting(meta)
            if pod is not None:
                words = f'Back-off pulling image "{image}"'
                self._cluster.events.say(pod, "BackOff", words)
                self._show(pod, PULL_REASONS[1], f"{words}: ErrImagePull: {why}")

        wait = min(2 * wait, LONGEST_SECONDS) or self.first_seconds
        self._cluster.timeline.after(BACK_OFF_SECONDS, back_off)
        self._cluster.timeline.after(wait, lambda: self.pull(meta, pulled, wait))

    def _waiting(self, meta: Json) -> Json | None:
        pod = self._cluster.pod(meta)
        if pod is None or _facts.phase(pod) != "Pending" or _facts.deleting(pod):
            return None
        return None if self._cluster.out_of_reach(pod) else pod

    def _show(self, pod: Json, reason: str, message: str) -> None:
        now = self._cluster.timeline.stamp()
        self._cluster.put_pod(_states.waiting(pod, reason, message, now))
        self._cluster.events.say(pod, "Failed", f"Error: {reason}", warning=True)

"""The memory of what an executor saw last.

It keeps the executor's own observations in order, and the ends that it has seen when the Job is
gone.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from diloco_protocol import ReplicaState
from diloco_protocol.backend import Recent

from ._facts import PodFacts
from ._observation import Observation

if TYPE_CHECKING:
    from diloco_protocol import ReplicaHandle, ReplicaStatus

_MOST = 50_000


class Memory:
    """The last state of each replica, its end, and the pod that succeeded. Bounded; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: Recent[ReplicaHandle, tuple[Observation, ReplicaStatus, int]] = Recent(_MOST)
        self._ends: Recent[ReplicaHandle, ReplicaStatus] = Recent(_MOST)
        self._succeeded: Recent[ReplicaHandle, PodFacts] = Recent(_MOST)
        self._forgotten: Recent[ReplicaHandle, bool] = Recent(_MOST)
        self._without_log: Recent[ReplicaHandle, float] = Recent(_MOST)

    def seen(self, handles: Mapping[int, ReplicaHandle]) -> dict[int, Observation]:
        """Return what was last seen of some replicas, by index."""
        seen = {index: self._seen.get(handle) for index, handle in handles.items()}
        return {index: last[0] for index, last in seen.items() if last is not None}

    def keep(
        self,
        handle: ReplicaHandle,
        status: ReplicaStatus,
        seen: Observation,
        succeeded: PodFacts | None,
        version: int,
    ) -> ReplicaStatus:
        """Remember a status, and return the one to report.

        An end stays as it was first reported, even when its pod is gone; and the report of a newer
        look stays valid when that of an older one comes later. But no replica is cancelled while it
        has a pod.

        Args:
            handle: The replica.
            status: Its status.
            seen: What was seen of it, to be remembered.
            succeeded: Its pod, if that has succeeded.
            version: A number that is larger for newer looks.
        """
        with self._lock:
            if handle in self._forgotten:
                return status
            known = self._seen.get(handle)
            if known is not None and known[2] > version:
                self._seen.keep(handle, known)
                return known[1]
            end = self._ends.get(handle) or status
            # A cancelled run that Kueue holds has no pods; it can get some if a user resumes it.
            is_live = not seen.podless and seen.pod is not None and seen.pod.live
            goes_on = end.state is ReplicaState.CANCELLED and not status.state.terminal and is_live
            status = status if goes_on else end
            if status.state.terminal:
                self._ends.keep(handle, status)
            else:
                self._ends.forget(handle)
            self._seen.keep(handle, (seen, status, version))
            if succeeded is not None and handle not in self._succeeded:
                self._succeeded.keep(handle, succeeded)
            return status

    def ends(self, handles: Iterable[ReplicaHandle]) -> dict[ReplicaHandle, ReplicaStatus]:
        """Return the reported ends of some replicas; they stay true when the Job is gone."""
        ends = {handle: self._ends.get(handle) for handle in handles}
        return {handle: end for handle, end in ends.items() if end is not None}

    def forget(self, handles: Iterable[ReplicaHandle]) -> None:
        """Forget some replicas for good, even if they are seen once more while they are removed."""
        with self._lock:
            for handle in handles:
                self._forgotten.keep(handle, True)
                for kept in (self._seen, self._ends, self._succeeded, self._without_log):
                    kept.forget(handle)

    def succeeded(self, handle: ReplicaHandle) -> PodFacts | None:
        """Return the pod that succeeded, if it was seen."""
        return self._succeeded.get(handle)

    def without_log(self, handle: ReplicaHandle, now: float) -> float:
        """Return since when a replica's node has been known to have no log of it.

        That is ``now`` if it was not known before.
        """
        with self._lock:
            since = self._without_log.get(handle)
            if since is None:
                self._without_log.keep(handle, now)
            return now if since is None else since

    def has_log(self, handle: ReplicaHandle) -> None:
        """Remember that a replica's node has its log."""
        self._without_log.forget(handle)

"""The memory of what an executor saw last.

It keeps the executor's own observations in order, and the ends that it has seen when the Job is
gone.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from diloco_protocol import ReplicaState

from ._facts import PodFacts
from ._observation import Observation

if TYPE_CHECKING:
    from diloco_protocol import ReplicaHandle, ReplicaStatus

_MOST = 50_000


class Memory:
    """The last state of each replica, its end, and the pod that succeeded. Bounded; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: dict[ReplicaHandle, tuple[Observation, ReplicaStatus, int]] = {}
        self._ends: dict[ReplicaHandle, ReplicaStatus] = {}
        self._succeeded: dict[ReplicaHandle, PodFacts] = {}
        self._forgotten: dict[ReplicaHandle, bool] = {}
        self._without_log: dict[ReplicaHandle, float] = {}

    def seen(self, handles: Mapping[int, ReplicaHandle]) -> dict[int, Observation]:
        """Return what was last seen of some replicas, by index."""
        with self._lock:
            return {
                index: self._seen[handle][0]
                for index, handle in handles.items()
                if handle in self._seen
            }

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
            known = self._seen.pop(handle, None)
            if known is not None and known[2] > version:
                self._seen[handle] = known
                return known[1]
            end = self._ends.get(handle, status)
            # A cancelled run that Kueue holds has no pods; it can get some if a user resumes it.
            goes_on = (
                end.state is ReplicaState.CANCELLED and not status.state.terminal and _is_live(seen)
            )
            status = status if goes_on else end
            if status.state.terminal:
                self._ends[handle] = status
            else:
                self._ends.pop(handle, None)
            self._seen[handle] = seen, status, version
            if succeeded is not None:
                self._succeeded.setdefault(handle, succeeded)
            for kept in (self._seen, self._ends, self._succeeded, self._forgotten):
                while len(kept) > _MOST:
                    del kept[next(iter(kept))]
            return status

    def ends(self, handles: Iterable[ReplicaHandle]) -> dict[ReplicaHandle, ReplicaStatus]:
        """Return the reported ends of some replicas; they stay true when the Job is gone."""
        with self._lock:
            return {handle: self._ends[handle] for handle in handles if handle in self._ends}

    def forget(self, handles: Iterable[ReplicaHandle]) -> None:
        """Forget some replicas for good, even if they are seen once more while they are removed."""
        with self._lock:
            for handle in handles:
                self._forgotten[handle] = True
                for kept in (self._seen, self._ends, self._succeeded, self._without_log):
                    kept.pop(handle, None)

    def succeeded(self, handle: ReplicaHandle) -> PodFacts | None:
        """Return the pod that succeeded, if it was seen."""
        with self._lock:
            return self._succeeded.get(handle)

    def without_log(self, handle: ReplicaHandle, now: float) -> float:
        """Return since when a replica's node has been known to have no log of it.

        That is ``now`` if it was not known before.
        """
        with self._lock:
            since = self._without_log.setdefault(handle, now)
            if len(self._without_log) > _MOST:
                del self._without_log[next(iter(self._without_log))]
            return since

    def has_log(self, handle: ReplicaHandle) -> None:
        """Remember that a replica's node has its log."""
        with self._lock:
            self._without_log.pop(handle, None)


def _is_live(seen: Observation) -> bool:
    return not seen.podless and seen.pod is not None and seen.pod.live

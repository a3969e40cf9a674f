"""Queries for the events of objects that make no progress, at intervals and if allowed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from diloco_protocol import BackendError, ReplicaStatus
from diloco_protocol.backend import Recent

from .._client._cluster import Cluster
from .._state._events import STUCK_SECONDS, Event, explained, read_events

_MOST = 1000


class Warnings:
    """The warnings of Jobs and pods. Thread-safe.

    Args:
        cluster: The cluster.
        clock: Returns the time in Unix seconds.
    """

    def __init__(self, cluster: Cluster, clock: Callable[[], float]) -> None:
        self._cluster = cluster
        self._clock = clock
        self._known: Recent[str, tuple[float, list[Event]]] = Recent(_MOST)

    def explain(self, status: ReplicaStatus, namespace: str, uid: str) -> ReplicaStatus:
        """Return the status with the cluster's warnings; an object is queried every 15 s at most.

        Events only make a message better: where they cannot be read, the status stays as it is.
        """
        query_time, events = self._known.get(uid) or (None, [])
        now = self._clock()
        if query_time is None or not query_time <= now < query_time + STUCK_SECONDS:
            with suppress(BackendError):  # check() says whether the right is missing
                events = read_events(self._cluster.list_events(namespace, uid))
            self._known.keep(uid, (now, events))
        return explained(status, events)

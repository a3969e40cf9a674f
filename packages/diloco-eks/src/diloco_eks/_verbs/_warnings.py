"""Queries for the events of objects that make no progress, at intervals and if allowed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from diloco_protocol import BackendError, ForbiddenError, ReplicaStatus
from diloco_protocol.backend import Recent

from .._client._cluster import Cluster
from .._client._errors import warn
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
        self._forbidden = False

    def explain(self, status: ReplicaStatus, namespace: str, uid: str) -> ReplicaStatus:
        """Return the status with the cluster's warnings; an object is queried every 15 s at most.

        Events only make a message better: where they cannot be read, the status stays as it is.
        """
        query_time, events = self._known.get(uid) or (None, [])
        now = self._clock()
        if query_time is None or not query_time <= now < query_time + STUCK_SECONDS:
            try:
                events = read_events(self._cluster.list_events(namespace, uid))
            except ForbiddenError as error:
                self._log(error)
            except BackendError:
                return explained(status, events)
            self._known.keep(uid, (now, events))
        if self._forbidden and not events:
            text = "why, the events would say, and listing them is not allowed"
            return replace(status, message=f"{status.message}; {text}" if status.message else text)
        return explained(status, events)

    def _log(self, error: ForbiddenError) -> None:
        if not self._forbidden:
            self._forbidden = True
            warn(str(error))

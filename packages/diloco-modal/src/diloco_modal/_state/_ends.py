"""The ends of replicas that an executor remembers."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

from diloco_protocol import ReplicaHandle, ReplicaStatus
from diloco_protocol.backend import MAX_REPLICAS

_MOST_BYTES = 256 * 2**20


class Ends:
    """Remembered ends of replicas, with their results. Safe to share between threads.

    If there are too many, or if their results are too large, the oldest are forgotten, so that
    Modal is asked again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[ReplicaHandle, tuple[ReplicaStatus, Any, int]] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._known)

    def get(self, handle: ReplicaHandle) -> tuple[ReplicaStatus, Any] | None:
        """Return how a replica has ended, and its result; None if that is not remembered."""
        known = self._known.get(handle)
        return None if known is None else known[:2]

    def keep(self, handle: ReplicaHandle, status: ReplicaStatus, result: Any, size: int) -> None:
        """Remember an end; ``size`` is the number of characters of its result."""
        with self._lock:
            self._drop(handle)
            self._known[handle] = status, result, size
            self._bytes += size
            # The newest stays, however large it is: the caller is about to read it.
            while len(self) > 1 and (len(self) > MAX_REPLICAS or self._bytes > _MOST_BYTES):
                self._drop(next(iter(self._known)))

    def forget(self, handles: Iterable[ReplicaHandle]) -> None:
        """Forget the ends of replicas, so that Modal is asked again."""
        with self._lock:
            for handle in handles:
                self._drop(handle)

    def _drop(self, handle: ReplicaHandle) -> None:
        if (known := self._known.pop(handle, None)) is not None:
            self._bytes -= known[2]

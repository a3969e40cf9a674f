"""A memory of bounded size, for what saves calls and on which nothing else depends."""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

from ._request import MAX_REPLICAS

K = TypeVar("K")
V = TypeVar("V")


class Recent(Generic[K, V]):
    """Values by key; the oldest are forgotten if there are too many. Thread-safe."""

    def __init__(self, most: int = MAX_REPLICAS) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._values: dict[K, V] = {}

    def get(self, key: K) -> V | None:
        """Return the value of a key, or None."""
        return self._values.get(key)

    def keep(self, key: K, value: V) -> None:
        """Keep a value, and forget the oldest if there are too many."""
        with self._lock:
            self._values.pop(key, None)
            self._values[key] = value
            while len(self._values) > self._most:
                del self._values[next(iter(self._values))]

    def forget(self, key: K) -> None:
        """Forget a value, if there is one."""
        with self._lock:
            self._values.pop(key, None)

    def __contains__(self, key: K) -> bool:
        return key in self._values

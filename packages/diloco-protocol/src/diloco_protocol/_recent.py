"""Memories of an executor: of bounded size, and of the order of concurrent looks at replicas."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Generic, TypeVar

from ._request import MAX_REPLICAS

if TYPE_CHECKING:
    from ._handle import ReplicaHandle
    from ._types import ReplicaStatus


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


class LookOrder:
    """Remembers what looks have seen while older looks are under way. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun = 0
        self._under_way: set[int] = set()
        self._told: dict[ReplicaHandle, tuple[int, ReplicaStatus]] = {}

    @contextlib.contextmanager
    def look(self) -> Iterator[int]:
        """Begin a look, and give its number, which is larger than those of all earlier looks."""
        with self._lock:
            self._begun += 1
            number = self._begun
            self._under_way.add(number)
        try:
            yield number
        finally:
            with self._lock:
                self._under_way.remove(number)
                oldest = min(self._under_way, default=self._begun)
                if self._told:
                    self._told = {
                        handle: look for handle, look in self._told.items() if look[0] > oldest
                    }

    def newest(self, number: int, handle: ReplicaHandle, status: ReplicaStatus) -> ReplicaStatus:
        """Return what a look has seen, or what a newer look saw that returned before it."""
        with self._lock:
            look = self._told.get(handle)
            if look is not None and look[0] > number:
                return look[1]
            if min(self._under_way) < number:
                self._told[handle] = number, status
            return status

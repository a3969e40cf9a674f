"""One simulated process's access to the store: it can fail in every way that real ones do, and time
is virtual.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from diloco_core import CorruptedObjectError, ObjectNotFoundError, StoreUnavailableError
from diloco_core._store._api import RECORD_BYTES, Buffer, ObjectReader, too_large

from ._scheduler import Fault, Killed, Scheduler
from ._store import SimulatedStore

T = TypeVar("T")


class Connection:
    """One simulated process's access to the store; see :class:`._api.Store`.

    Every operation takes virtual time.

    Args:
        shared: The objects.
        scheduler: The time.
        rank: Whose process.
        incarnation: Which of its incarnations.
        faults: What goes wrong in it.
        latency: Mean seconds that a request takes.
        chance: Source of latencies.
        replace: Starts the next incarnation of the rank.
    """

    near = False
    retries = False
    exclusive = True
    largest: int | None = None
    background = None
    downtime = 0.0
    requests = None

    def __init__(
        self,
        shared: SimulatedStore,
        scheduler: Scheduler,
        *,
        rank: int = 0,
        incarnation: int = 1,
        faults: Sequence[Fault] = (),
        latency: float = 0.02,
        chance: random.Random | None = None,
        replace: Callable[[], None] | None = None,
    ) -> None:
        self.uri = "simulated://run"
        self.patience = 60.0
        self.rank = rank
        self.operations = 0
        self.offset = 0.0
        self.killed = False
        self.injected = 0.0
        # When each record of the log first arrived, by the process's clock.
        self.saw: dict[str, float] = {}
        self._shared = shared
        self._scheduler = scheduler
        self._faults = {
            f.operation: f for f in faults if (f.rank, f.incarnation) == (rank, incarnation)
        }
        self._latency = latency
        self._chance = chance or random.Random(0)
        self._replace = replace
        self._flips = False
        self._stale = 0.0
        self._sees_no_successor = False

    def clock(self) -> float:
        """The process's monotonic clock."""
        return self._scheduler.now + self.offset

    def sleep(self, seconds: float) -> None:
        """Let time pass for the process."""
        if self.killed:
            raise Killed
        self._scheduler.sleep(seconds)

    def put(self, key: str, parts: Iterable[Buffer]) -> int:
        """Write an object in one step."""
        data = b"".join(bytes(part) for part in parts)
        looked = self._sees_no_successor

        def act() -> None:
            if key.startswith("inner/") and not looked and self._shared.has_successor(key):
                self._shared.intrusions.append(key)
            self._shared.write(key, data)

        self._request("put", act, lambda: self._tear(key, data))
        self._shared.sent[self.rank] += len(data)
        return len(data)

    def create(self, key: str, data: bytes | Iterable[Buffer]) -> bool:
        """Write an object unless the key exists."""
        whole = data if isinstance(data, bytes) else b"".join(bytes(part) for part in data)

        def act() -> bool:
            if self._shared.exclusive and key in self._shared.objects:
                return False
            self._shared.write(key, whole)
            return True

        def tear() -> None:
            if key not in self._shared.objects and key != "manifest.json":
                self._tear(key, whole)

        created = self._request("create", act, tear)
        self._shared.sent[self.rank] += len(whole)
        return created

    def get(self, key: str, largest: int = RECORD_BYTES) -> bytes:
        """Read a whole small object."""
        try:
            data = self._arrived(self._request("get", lambda: self._find(key)))
        except ObjectNotFoundError:
            self._sees_no_successor = key.startswith("claims/")
            raise
        if len(data) > largest:
            raise too_large(key, len(data), largest)
        if key.startswith("commits/"):
            self.saw.setdefault(key, self.clock())
        return data

    def open(self, key: str, size: int | None = None) -> Reader:
        """Open an object for ranged reads."""
        if size is not None:
            return Reader(self, key, size, unseen=True)
        return Reader(self, key, self._request("open", lambda: len(self._find(key))))

    def read(self, key: str, offset: int, size: int, *, fresh: bool, unseen: bool) -> bytes:
        """A range of an object; ``fresh`` where it is a request of its own, ``unseen`` where
        opening it was none.
        """
        if fresh:
            self._request("read", lambda: None)
            if unseen:
                self._find(key)
        self._shared.received[self.rank] += size
        if key not in self._shared.objects and key in self._shared.written_over:
            return b"\x55" * size
        return self._arrived(self._find(key)[offset : offset + size])

    def list(self, prefix: str) -> dict[str, int]:
        """Keys below a folder and their sizes."""

        def act() -> dict[str, int]:
            ago, self._stale = self._stale, 0.0
            return self._shared.stale(prefix, ago) if ago else self._shared.below(prefix)

        return self._request("list", act)

    def delete(self, keys: Iterable[str], *, unread: bool = False) -> None:
        """Remove objects; readers of what is called unread see other bytes from then on."""
        gone = list(keys)

        def act() -> None:
            for key in gone:
                self._shared.remove(key)
            if unread:
                self._shared.written_over.update(gone)
            if self._shared.after_delete is not None:
                self._shared.after_delete(gone)

        self._request("delete", act)

    def close(self) -> None:
        """Nothing is held."""

    def _find(self, key: str) -> bytes:
        try:
            return self._shared.objects[key]
        except KeyError:
            raise ObjectNotFoundError(f"there is no object {key!r}") from None

    def _arrived(self, data: bytes) -> bytes:
        """Data as it arrives: with one flipped bit where that is due."""
        if not (self._flips and data):
            return data
        self._flips = False
        return self._damaged(data)

    def _damaged(self, data: bytes) -> bytes:
        damaged = bytearray(data)
        position = self._chance.randrange(8 * len(data))
        damaged[position // 8] ^= 1 << position % 8
        return bytes(damaged)

    def _rot(self) -> None:
        keys = [
            key
            for key, data in sorted(self._shared.objects.items())
            if data and not key.startswith("manifest")
        ]
        if keys:
            key = self._chance.choice(keys)
            data = self._shared.objects[key]
            cut = self._chance.random() < 1 / 3
            self._shared.damage(
                key, data[: self._chance.randrange(len(data))] if cut else self._damaged(data)
            )

    def _tear(self, key: str, data: bytes) -> None:
        """Leave a part of an object, as after a power cut; what it should have been was decided."""
        self._shared.write(key, data)
        self._shared.damage(key, data[: self._chance.randrange(len(data))] if data else b"")

    def _request(
        self, kind: str, act: Callable[[], T], tear: Callable[[], None] | None = None
    ) -> T:
        """One request: it travels, takes effect at one instant, and its answer travels back."""
        if self.killed:
            raise Killed
        self.operations += 1
        self._shared.requests[kind] += 1
        if kind != "put":  # which may be sent again
            self._sees_no_successor = False
        fault = self._faults.get(self.operations)
        what, seconds = (fault.kind, fault.seconds) if fault else ("", 0.0)
        self._shared.now = self._scheduler.now
        if what == "flip":
            self._flips = True
        if what == "stale list":
            self._stale = seconds
        if what == "rot":
            self._rot()
        if what in {"delay", "zombie"}:
            self.injected += seconds
        self._wait(seconds if what == "delay" else 0.0)
        if what == "tear" and kind == "put" and tear is not None:
            tear()
        if what in {"kill before", "tear"}:
            self._kill()
        if what == "lose request":
            raise StoreUnavailableError(f"injected: {kind} was lost")
        if what == "zombie" and self._replace is not None:
            self._replace()
            self.sleep(seconds)
        self._shared.now = self._scheduler.now
        if what == "torn record" and tear is not None:
            tear()
            self._kill()
        result = act()
        if what == "repeat" and kind in {"put", "create"}:
            self._scheduler.call_at(self._scheduler.now + seconds, act)
        self._wait()
        if what == "kill after":
            self._kill()
        if what == "lose answer":
            raise StoreUnavailableError(f"injected: the answer to {kind} was lost")
        if what == "jump":
            self.offset += seconds
        return result

    def _wait(self, more: float = 0.0) -> None:
        self.sleep(self._chance.expovariate(2 / self._latency) + more)

    def _kill(self) -> None:
        self.killed = True
        raise Killed


class Reader(ObjectReader):
    """An open object; every reading of it begins with a request."""

    def __init__(self, connection: Connection, key: str, size: int, unseen: bool = False) -> None:
        self.size = size
        self._connection = connection
        self._key = key
        self._fresh = True
        self._unseen = unseen

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from ``offset``."""
        data = self._connection.read(
            self._key, offset, len(buffer), fresh=self._fresh, unseen=self._unseen
        )
        self._fresh = False
        if len(data) != len(buffer):
            raise CorruptedObjectError(f"{self._key} is truncated")
        buffer[:] = data

    def close(self) -> None:
        """Nothing is held."""

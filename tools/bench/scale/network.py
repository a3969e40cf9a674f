"""One replica's connections to the store: requests that take virtual time, also in the background.

A request in the foreground lets its thread sleep. What is done in the background needs no thread of
its own: it is run at once when a connection is free, its requests move a time of its own on instead
of sleeping, and its result can be had when that time has come.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from concurrent.futures import Executor, Future
from functools import partial
from typing import TYPE_CHECKING, Any

from .virtual_time import closed_gate

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Sequence

    from .s3 import Bucket
    from .virtual_time import VirtualTime


class Network:
    """What one replica sends and receives.

    Args:
        time: Virtual time.
        bucket: What the replicas share.

    Attributes:
        requests: How many requests were sent, by kind.
        sent: Bytes that were sent.
        received: Bytes that were received.
        waits: How often the replica waited for the network: its serial round trips.
    """

    def __init__(self, time: VirtualTime, bucket: Bucket) -> None:
        self.time = time
        self.bucket = bucket
        self.s3 = bucket.s3
        self.requests: Counter[str] = Counter()
        self.sent = 0
        self.received = 0
        self.waits = 0
        self._own_time: float | None = None  # of what is run in the background
        self._card = {"up": 0.0, "down": 0.0}
        self._repeats = False

    @property
    def in_background(self) -> bool:
        """Whether something is run that nobody waits for at the moment."""
        return self._own_time is not None

    def clock(self) -> float:
        """Now."""
        return self.time.now if self._own_time is None else self._own_time

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        if self._own_time is None:
            self.time.sleep(seconds)
        else:
            self._own_time += seconds

    def request(self, kind: str, up: int = 0, down: int = 0) -> None:
        """Send a request, and wait until all of its bytes have been moved."""
        self._wait_until(self._sent(kind, self.clock(), up, down), 1)

    def upload(self, sizes: Sequence[int], at_once: int) -> None:
        """Send an object in parts of these sizes: a first request, many at once, a last one."""
        begun = self._sent("PUT", self.clock(), 0, 0)
        lanes = [begun] * at_once
        for size in sizes:
            heapq.heapreplace(lanes, self._sent("PUT", lanes[0], size, 0))
        self._wait_until(self._sent("PUT", max(lanes), 0, 0), 2 + -(-len(sizes) // at_once))

    def run_in_background(self, act: Callable[[], Any]) -> tuple[Any, BaseException | None, float]:
        """What something returns or raises, and when it is through."""
        self._own_time = self.time.now
        result, failed = None, None
        try:
            result = act()
        except BaseException as error:  # noqa: BLE001 - for whoever waits for the result
            failed = error
        through, self._own_time = self._own_time, None
        return result, failed, through

    def repeat(self, seconds: float, act: Callable[[], Any]) -> Callable[[], None]:
        """Do something in the background again and again; returns what ends that."""
        over = False

        def again() -> None:
            if not over:
                self._repeats = True
                self.run_in_background(act)
                self._repeats = False
                self.time.call_at(self.time.now + seconds, again)

        def end() -> None:
            nonlocal over
            over = True

        self.time.call_at(self.time.now + seconds, again)
        return end

    def _sent(self, kind: str, time: float, up: int, down: int) -> float:
        """When a request is through that is sent at some time."""
        self.requests[kind] += 1
        self.sent += up
        self.received += down
        first = self.bucket.admit(kind, time) + self.s3.latency
        return max(self._moved("up", first, up), self._moved("down", first, down))

    def _moved(self, way: str, time: float, size: int) -> float:
        """When so many bytes have been moved: the network card serves requests in their order."""
        if not size:
            return time
        # In reality connections share the card: the few bytes of a sign of life do not wait for the
        # whole of a long upload.
        if self._repeats:
            return time + size / self.s3.connection
        self._card[way] = max(self._card[way], time) + size / self.s3.network
        return max(time + size / self.s3.connection, self._card[way])

    def _wait_until(self, time: float, trips: int) -> None:
        if self._own_time is None:
            self.waits += trips
            self.time.sleep(time - self.time.now)
        else:
            self._own_time = time


class Background(Executor):
    """Runs what is submitted over a number of connections, in order, in virtual time."""

    def __init__(self, network: Network, connections: int) -> None:
        self._network = network
        self._free = connections
        self._queue: deque[tuple[InBackground, Callable[[], Any]]] = deque()

    def submit(self, act: Callable[..., Any], /, *arguments: Any, **named: Any) -> InBackground:
        """Run something when a connection is free; it must not wait for anything else run here."""
        future = InBackground(self._network)
        if arguments or named:
            act = partial(act, *arguments, **named)
        # Not at once: what is done may need a lock that the caller holds. And in the background it
        # is later than now.
        self._network.time.call_at(self._network.clock(), partial(self._add, future, act))
        return future

    # Nothing to wait for
    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: ARG002
        """Cancel what has not begun."""
        if cancel_futures:
            for future, _ in self._queue:
                future.cancel()

    def _add(self, future: InBackground, act: Callable[[], Any]) -> None:
        self._queue.append((future, act))
        self._go_on()

    def _go_on(self) -> None:
        while self._free and self._queue:
            future, act = self._queue.popleft()
            if future.set_running_or_notify_cancel():
                self._free -= 1
                result, failed, through = self._network.run_in_background(act)
                self._network.time.call_at(through, partial(self._end, future, result, failed))

    def _end(self, future: InBackground, result: Any, failed: BaseException | None) -> None:
        self._free += 1
        future.end(result, failed)
        self._go_on()


class InBackground(Future[Any]):
    """What is being done in the background; whoever asks for its result waits in virtual time."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self._network = network
        self._gates: list[threading.Lock] = []

    def result(self, timeout: float | None = None) -> Any:
        """What was returned, as soon as it is."""
        self._wait()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What was raised, as soon as it is over."""
        self._wait()
        return super().exception(timeout)

    def end(self, result: Any, failed: BaseException | None) -> None:
        """It is through."""
        if failed is None:
            self.set_result(result)
        else:
            self.set_exception(failed)
        for gate in self._gates:
            self._network.time.open(gate)

    def _wait(self) -> None:
        if self.done():
            return
        if self._network.in_background:
            raise RuntimeError(
                "what is done in the background must not wait for anything else that is done there"
            )
        self._network.waits += 1
        gate = closed_gate()
        self._gates.append(gate)
        self._network.time.wait_at(gate)

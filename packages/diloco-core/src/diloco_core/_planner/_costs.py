"""What the steps of a sync cost one replica: requests, bytes and seconds, over a store that behaves in a certain way."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

from .._checks import check_positive, check_whole
from .._errors import ConfigurationError
from .._store._transfer import PART_BYTES, Transfer

READS = ("GET", "LIST")
"""Kinds of requests that count towards the rate of reads; the others count as writes."""

_STEADY = 64  # shards, after which each takes as long as the one before
_MANY = 8  # rounds, after which it does not matter that the last one is not full


@dataclass(frozen=True, slots=True)
class StoreModel:
    """How a store behaves, as one replica sees it. How many requests are under way at once is a matter of the code.

    Attributes:
        connection_bandwidth: Bytes per second of one connection.
        first_byte: Seconds from a GET or LIST to its first byte.
        put: Seconds that a PUT or DELETE takes besides its transfer.
        poll: Seconds that pass, each time that a replica waits for the others, until it looks again.
        reads: GET and LIST requests per second that the run's prefix takes, of all replicas together; None: any number.
        writes: PUT and DELETE requests per second that it takes; None: any number.
        page: Keys in one answer to a LIST.
        put_price: US dollars per PUT or LIST.
        get_price: US dollars per GET.
    """

    connection_bandwidth: float = 90e6
    first_byte: float = 0.025
    put: float = 0.040
    poll: float = 0.05
    reads: float | None = 5500.0
    writes: float | None = 3500.0
    page: int = 1000
    put_price: float = 5e-6
    get_price: float = 4e-7

    def __post_init__(self) -> None:
        check_positive("connection_bandwidth", self.connection_bandwidth)
        check_whole("page", self.page)
        for name in ("reads", "writes"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name), " of requests per second, or None")
        for name in ("first_byte", "put", "poll", "put_price", "get_price"):
            value = getattr(self, name)
            if (
                isinstance(value, bool)
                or not isinstance(value, (int, float))
                or not 0 <= value < math.inf
            ):
                raise ConfigurationError(f"{name} must be a number, 0 or more, not {value!r}")

    def latency(self, kind: str) -> float:
        """Seconds that a request takes besides its transfer."""
        return self.first_byte if kind in READS else self.put

    def rate(self, kind: str) -> float:
        """How many requests of this kind the prefix takes per second."""
        rate = self.reads if kind in READS else self.writes
        return math.inf if rate is None else rate


@dataclass(frozen=True, slots=True)
class Ranges:
    """What is read with requests of their own.

    Attributes:
        count: How many requests.
        size: Bytes of all of them.
        largest: Bytes of the largest one.
    """

    count: float
    size: float
    largest: float

    def times(self, factor: float) -> Ranges:
        """The same of so many objects."""
        return Ranges(self.count * factor, self.size * factor, self.largest)


class _Queue:
    """The requests of one kind of rate since the replicas have met: reads, or writes.

    All replicas send them at the same time, so the last one is let through later than the first. It takes its further steps
    later too, where nobody is in its way any more: so only the longest burst counts. Unless there are more requests than the
    store takes in all that time: then it lets them through one after the other, without a pause.
    """

    def __init__(self) -> None:
        self._alone = self._served = self._rounds = self._burst = 0.0

    def add(self, alone: float, served: float, rounds: float) -> None:
        """Further requests.

        Args:
            alone: Seconds that they take where nobody else uses the store.
            served: Seconds that the store needs to let those of all replicas through.
            rounds: In how many rounds, one after another, each replica sends them.
        """
        self._alone += alone
        self._served += served
        self._rounds += rounds
        self._burst = max(self._burst, served / rounds)

    @property
    def delay(self) -> float:
        """Seconds by which the last replica is later because of the rate."""
        if not self._rounds:
            return 0.0
        return max(self._burst, self._served + self._alone / self._rounds - self._alone)


class Costs:
    """What a sync costs a replica, step by step. All replicas take the same steps.

    Args:
        store: How the store behaves.
        transfer: How the replicas read and write.
        replicas: How many replicas there are.
        bandwidth: Bytes per second that a replica moves in one direction.

    Attributes:
        requests: Requests by kind, as a mean over the replicas.
        sent: Bytes that a replica sends.
        received: Bytes that a replica receives.
    """

    def __init__(
        self, store: StoreModel, transfer: Transfer, replicas: int, bandwidth: float
    ) -> None:
        self.store = store
        self.transfer = transfer
        self.replicas = replicas
        self.bandwidth = bandwidth
        self.requests: defaultdict[str, float] = defaultdict(float)
        self.sent = 0.0
        self.received = 0.0
        self._passed = 0.0  # seconds
        self._met = self._longest = 0.0
        self._queues = _Queue(), _Queue()

    @property
    def seconds(self) -> float:
        """Seconds until the last replica is through."""
        return self._passed + max(queue.delay for queue in self._queues)

    @property
    def longest_part(self) -> float:
        """Seconds of the longest part between two moments at which everybody waits for the last replica."""
        return max(self._longest, self.seconds - self._met)

    def meet(self) -> None:
        """Everybody waits until the last replica has come here, and needs a moment to see it."""
        self._longest = self.longest_part
        self._passed = self._met = self.seconds + self.store.poll
        self._queues = _Queue(), _Queue()

    def ask(
        self,
        kind: str,
        count: float = 1,
        *,
        by: float | None = None,
        times: float = 1.0,
        at_once: int = 1,
    ) -> None:
        """Small requests.

        Args:
            kind: Of which kind.
            count: How many of them.
            by: How many of the replicas send them; the others wait for these. All of them by default.
            times: In how many of the syncs this happens.
            at_once: How many of them are under way at the same time.
        """
        if by != 0:
            rounds = math.ceil(count / at_once)
            self._step(kind, count, rounds * self.store.latency(kind), rounds, by=by, times=times)

    def list(self, keys: float, *, by: float | None = None, times: float = 1.0) -> None:
        """List so many keys, page after page."""
        self.ask("LIST", max(1, math.ceil(keys / self.store.page)), by=by, times=times)

    def upload(self, size: float, at_once: int) -> None:
        """Write an object; a large one in parts, of which so many go up at the same time."""
        self.sent += size
        if size < PART_BYTES:
            self._step("PUT", 1, self._one("PUT", size), 1)
            return
        parts = math.ceil(size / PART_BYTES)
        rounds = math.ceil(parts / at_once)
        # The last part is smaller, which matters where it is the only one of its round.
        alone = (parts - 1) % at_once == 0
        last = size - (parts - 1) * PART_BYTES if alone else PART_BYTES
        seconds = (rounds - 1) * self._one("PUT", PART_BYTES) + self._one("PUT", last)
        seconds = max(seconds, self.store.put + size / self.bandwidth)
        # One request begins it, and one ends it.
        self._step("PUT", parts + 2, seconds + 2 * self.store.put, 2 + rounds)

    def create(self, objects: float, size: float, at_once: int, times: float = 1.0) -> None:
        """Create objects that must not be there, each with one request, of which so many go up at the same time."""
        self.sent += objects * size * times
        rounds = _rounds(objects, at_once)
        seconds = max(
            rounds * self._one("PUT", size), self.store.put + objects * size / self.bandwidth
        )
        self._step("PUT", objects, seconds, rounds, times=times)

    def read(self, ranges: Ranges, budget: float) -> None:
        """Read ranges, with so much memory for those that are under way."""
        if ranges.count:
            self.received += ranges.size
            at_once, each = self._reading(ranges, budget)
            rounds = _rounds(ranges.count, at_once)
            seconds = max(rounds * each, self.store.first_byte + ranges.size / self.bandwidth)
            self._step("GET", ranges.count, seconds, rounds)

    def update(self, shards: int, ranges: Ranges, published: float, at_once: int) -> None:
        """Read contributions to a replica's shards, and create each shard's object in the background when it is updated.

        Args:
            shards: How many shards the replica has.
            ranges: What is read for each.
            published: Bytes of each object, which takes no memory from the reads.
            at_once: How many objects are under way at the same time.
        """
        self.received += shards * ranges.size
        self.sent += shards * published
        self._step("PUT", shards, 0.0, math.ceil(shards / at_once))
        rounds = shards * ranges.count / self._reading(ranges, self.transfer.budget_bytes)[0]
        self._step(
            "GET",
            shards * ranges.count,
            self._pipelined(shards, ranges, published, at_once),
            rounds,
        )

    def _pipelined(self, shards: int, ranges: Ranges, published: float, at_once: int) -> float:
        """Seconds for the reads and uploads of some shards, one after another, with the uploads in the background."""
        if shards > _STEADY:
            first, second = (
                self._pipelined(count, ranges, published, at_once)
                for count in (_STEADY // 2, _STEADY)
            )
            return second + (shards - _STEADY) * (second - first) / (_STEADY - _STEADY // 2)
        budget = self.transfer.budget_bytes
        together, each = self._reading(ranges, budget)
        per_byte = (
            max(1 / self.bandwidth, each / together * ranges.count / ranges.size)
            if ranges.count
            else 0.0
        )
        read = ranges.size * per_byte
        updated = max(read, _rounds(ranges.count, together) * each)
        uploaded: list[float] = []
        for number in range(shards):
            if number:
                # Reading goes on while an upload is waited for, as far as there is memory.
                read = max(
                    read + ranges.size * per_byte, updated + (ranges.size - budget) * per_byte
                )
                updated = max(read, updated)
            if number >= at_once:
                updated = max(updated, uploaded[number - at_once])
            uploaded.append(updated + self._one("PUT", published))
        return uploaded[-1]

    def _reading(self, ranges: Ranges, budget: float) -> tuple[float, float]:
        """How many ranges are read at the same time, and the seconds of a round of them."""
        connections = self.transfer.connections
        if not ranges.count:
            return connections, 0.0
        mean = ranges.size / ranges.count
        fitting = max(1, budget // ranges.largest) * ranges.largest / mean
        if fitting < connections:  # small ones take no memory, and so wait for the large ones
            return fitting, self._one("GET", ranges.largest)
        return connections, self._one("GET", mean)

    def _one(self, kind: str, size: float) -> float:
        """Seconds of a request that moves so many bytes."""
        return self.store.latency(kind) + size / min(
            self.store.connection_bandwidth, self.bandwidth
        )

    def _step(
        self,
        kind: str,
        count: float,
        alone: float,
        rounds: float,
        *,
        by: float | None = None,
        times: float = 1.0,
    ) -> None:
        """All replicas (or so many) send requests of one kind, which takes each of them so long."""
        senders = self.replicas if by is None else by
        self.requests[kind] += times * count * senders / self.replicas
        self._passed += times * alone
        served = times * senders * count / self.store.rate(kind)
        self._queues[kind in READS].add(times * alone, served, max(rounds, 1.0))


def _rounds(count: float, at_once: float) -> float:
    """In how many rounds so many requests are sent."""
    return count / at_once if count > _MANY * at_once else math.ceil(count / at_once)

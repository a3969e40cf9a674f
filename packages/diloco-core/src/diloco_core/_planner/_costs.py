"""The costs of a sync to one replica, step by step: requests, bytes and seconds.

The store behaves as a model says.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

from .._checks import check_positive, whole
from .._errors import ConfigurationError
from .._store._transfer import PART_BYTES, Transfer

_MANY = 8  # with more rounds than this, it does not matter that the last one may not be full


@dataclass(frozen=True, slots=True)
class Ranges:
    """Ranges of objects, each of which is read with a request of its own.

    Attributes:
        count: How many ranges there are.
        size: Bytes of all of them together.
        largest: Bytes of the largest one.
    """

    count: float
    size: float
    largest: float

    def times(self, factor: float) -> Ranges:
        """The same ranges of ``factor`` objects."""
        return Ranges(self.count * factor, self.size * factor, self.largest)


class _Queue:
    """The requests that one rate limits since all replicas last waited for each other.

    The rate is that of reads, or that of writes. All replicas send requests at the same time, so
    the last replica's request is served later than the first one's. That replica then takes its
    further steps later too, when the others are no longer in its way. So only the longest burst
    causes a delay, unless there are more requests than the store can serve in the whole time: then
    it serves them one after another without a pause.
    """

    def __init__(self) -> None:
        self._unhindered = self._served = self._rounds = self._burst = 0.0

    def add(self, unhindered: float, served: float, rounds: float) -> None:
        """Add requests.

        Args:
            unhindered: Seconds that one replica's requests take if no other replica uses the store.
            served: Seconds that the store needs to serve the requests of all replicas.
            rounds: The number of rounds, one after another, in which each replica sends its
                requests.
        """
        self._unhindered += unhindered
        self._served += served
        self._rounds += rounds
        self._burst = max(self._burst, served / rounds)

    @property
    def delay(self) -> float:
        """Seconds by which the rate limit delays the last replica."""
        pause = self._unhindered / max(self._rounds, 1.0) - self._unhindered
        return max(self._burst, self._served + pause)


@dataclass(eq=False)
class Costs:
    """Adds up what a sync costs a replica, step by step. All replicas take the same steps.

    Args:
        store: How the store behaves.
        transfer: How the replicas read and write.
        replicas: How many replicas there are.
        bandwidth: Bytes per second that a replica can move in one direction.

    Attributes:
        requests: The number of requests by kind, as a mean over the replicas.
        sent: Bytes that a replica sends.
        received: Bytes that a replica receives.
    """

    store: StoreModel
    transfer: Transfer
    replicas: int
    bandwidth: float

    def __post_init__(self) -> None:
        self.requests = defaultdict[str, float](float)
        self.sent = self.received = 0.0
        self._passed = 0.0  # seconds
        self._queues = _Queue(), _Queue()

    @property
    def seconds(self) -> float:
        """Seconds until the last replica has finished all steps so far."""
        return self._passed + max(queue.delay for queue in self._queues)

    def meet(self) -> None:
        """Let all replicas wait until the last one has come to this point.

        They need a moment to see that it has.
        """
        self._passed = self.seconds + self.store.poll
        self._queues = _Queue(), _Queue()

    def ask(
        self,
        kind: str,
        count: float = 1,
        *,
        size: float = 0.0,
        by: float | None = None,
        times: float = 1.0,
        at_once: int = 1,
    ) -> None:
        """Send small requests.

        Args:
            kind: Their kind.
            count: How many requests a replica sends.
            size: Bytes that each moves.
            by: How many of the replicas send them while the others wait; all of them if left out.
            times: The share of syncs in which this happens; 1 for every sync.
            at_once: How many requests of a replica are under way at the same time.
        """
        if by != 0:
            rounds = math.ceil(count / at_once)
            seconds = rounds * self._one(kind, size)
            self._step(kind, count, seconds, rounds, count * size, by=by, times=times)

    def list(self, keys: float, *, by: float | None = None, times: float = 1.0) -> None:
        """List this many keys, page after page."""
        self.ask("LIST", max(1, math.ceil(keys / self.store.page)), by=by, times=times)

    def upload(self, size: float, at_once: int) -> None:
        """Write an object.

        A large one is written in parts, ``at_once`` of them at the same time.
        """
        if size < PART_BYTES:
            self.ask("PUT", size=size)
            return
        parts = math.ceil(size / PART_BYTES)
        rounds = math.ceil(parts / at_once)
        last = min(PART_BYTES, size - (rounds - 1) * at_once * PART_BYTES)
        seconds = (rounds - 1) * self._one("PUT", PART_BYTES) + self._one("PUT", last)
        seconds = max(seconds, self.store.put + size / self.bandwidth)
        # One more request begins the upload, and one ends it.
        self._step("PUT", parts + 2, seconds + 2 * self._one("PUT"), 2 + rounds, size)

    def create(self, objects: float, size: float, at_once: int, times: float) -> None:
        """Create objects that must not exist yet: a request each, ``at_once`` of them together."""
        rounds = _rounds(objects, at_once)
        seconds = max(
            rounds * self._one("PUT", size), self.store.put + objects * size / self.bandwidth
        )
        self._step("PUT", objects, seconds, rounds, objects * size, times=times)

    def read(self, ranges: Ranges, budget: float) -> None:
        """Read ranges of objects with ``budget`` bytes of memory for those that are under way."""
        if ranges.count:
            at_once, round_seconds = self._reading(ranges, budget)
            rounds = _rounds(ranges.count, at_once)
            seconds = max(
                rounds * round_seconds, self.store.first_byte + ranges.size / self.bandwidth
            )
            self._step("GET", ranges.count, seconds, rounds, ranges.size)

    def update(self, shards: int, ranges: Ranges, published: float, at_once: int) -> None:
        """Read the contributions to a replica's shards.

        When a shard is updated, create its object in the background.

        Args:
            shards: How many shards the replica has.
            ranges: What is read for each shard.
            published: Bytes of each object; objects take no memory from the reads.
            at_once: How many objects are under way at the same time.
        """
        together, round_seconds = self._reading(ranges, self.transfer.budget_bytes)
        upload = self._one("PUT", published)
        # Ranges of the next shard are read before those of this one are all there.
        each = max(ranges.count * round_seconds / together, ranges.size / self.bandwidth)
        first = max(_rounds(ranges.count, together) * round_seconds, each)
        seconds = max(
            max(first, shards * each) + upload,
            first + math.ceil(shards / at_once) * upload,
            first + self.store.put + shards * published / self.bandwidth,
        )
        reads = shards * ranges.count
        self._step("PUT", shards, 0.0, math.ceil(shards / at_once), shards * published)
        self._step("GET", reads, seconds, reads / together, shards * ranges.size)

    def _reading(self, ranges: Ranges, budget: float) -> tuple[float, float]:
        """Return how many ranges are read at the same time, and the seconds of one such round."""
        connections = self.transfer.connections
        if not ranges.count:
            return connections, 0.0
        mean = ranges.size / ranges.count
        fitting = max(1, budget // ranges.largest) * ranges.largest / mean
        # Either the connections are the limit, or the memory: then small ranges, which take none,
        # have to wait for large ones.
        limits = (fitting, self._one("GET", ranges.largest)), (connections, self._one("GET", mean))
        return min(limits, key=lambda limit: limit[0] / limit[1])

    def _one(self, kind: str, size: float = 0.0) -> float:
        """Seconds of a request that moves so many bytes."""
        bandwidth = min(self.store.connection_bandwidth, self.bandwidth)
        return self.store.latency(kind) + size / bandwidth

    def _step(
        self,
        kind: str,
        count: float,
        unhindered: float,
        rounds: float,
        size: float,
        *,
        by: float | None = None,
        times: float = 1.0,
    ) -> None:
        """Let all replicas, or ``by`` of them, send requests of one kind.

        The requests take each of them ``unhindered`` seconds, and those of a replica move ``size``
        bytes together. The other arguments are those of :meth:`ask`; ``rounds`` is as in
        :meth:`_Queue.add`.
        """
        senders = self.replicas if by is None else by
        share = times * senders / self.replicas
        self.requests[kind] += share * count
        reads = kind in READS
        if reads:
            self.received += share * size
        else:
            self.sent += share * size
        self._passed += times * unhindered
        served = times * senders * count / self.store.rate(kind)
        self._queues[reads].add(times * unhindered, served, max(rounds, 1.0))


def _rounds(count: float, at_once: float) -> float:
    """The number of rounds in which ``count`` requests are sent, ``at_once`` at a time."""
    return count / at_once if count > _MANY * at_once else math.ceil(count / at_once)


READS = ("GET", "LIST")
"""Kinds of requests that count towards the rate of reads; all others count as writes."""


@dataclass(frozen=True, slots=True)
class StoreModel:
    """Describe how a store behaves, as one replica sees it.

    How many requests are under way at once depends on the code, not on the store.

    Attributes:
        connection_bandwidth: Bytes per second of one connection.
        first_byte: Seconds from a GET or LIST to the first byte of the answer.
        put: Seconds that a PUT or DELETE takes in addition to its transfer.
        poll: Seconds that a replica which waits for the others needs to notice that they are done.
        reads: GET and LIST requests per second that the run's prefix accepts from all replicas
            together; None for no limit.
        writes: PUT and DELETE requests per second that it accepts from all replicas together; None
            for no limit.
        page: The most keys in one answer to a LIST.
        put_price: US dollars per PUT or LIST.
        get_price: US dollars per GET.
        egress_price: US dollars per byte that a replica receives: 0, where the replicas are in the
            store's region. Clouds charge for what leaves a region: AWS lists 0.02 dollars per GB to
            another of its regions and 0.09 to the internet (https://aws.amazon.com/s3/pricing/),
            which are 2e-11 and 9e-11 dollars per byte.
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
    egress_price: float = 0.0

    def __post_init__(self) -> None:
        check_positive("connection_bandwidth", self.connection_bandwidth)
        whole("page", self.page)
        for name in ("reads", "writes"):
            if getattr(self, name) is not None:
                check_positive(
                    name, getattr(self, name), " of requests per second, or None for no limit"
                )
        for name in ("first_byte", "put", "poll", "put_price", "get_price", "egress_price"):
            check_amount(name, getattr(self, name))

    def latency(self, kind: str) -> float:
        """Seconds that a request takes in addition to its transfer."""
        return self.first_byte if kind in READS else self.put

    def rate(self, kind: str) -> float:
        """Return how many requests of this kind the prefix accepts per second."""
        rate = self.reads if kind in READS else self.writes
        return math.inf if rate is None else rate


def check_amount(name: str, value: object, unit: str = "") -> None:
    """Refuse what is not a number of at least 0.

    Raises:
        ConfigurationError: The message names it.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ConfigurationError(f"{name} must be a number{unit}, 0 or more, not {value!r}")

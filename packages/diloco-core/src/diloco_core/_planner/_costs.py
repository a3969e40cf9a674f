"""What the steps of a sync cost one replica: requests, bytes and seconds, over a store that behaves as a model says."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

from .._store._transfer import PART_BYTES, Transfer
from ._store_model import READS, StoreModel

_STEADY = 64  # after this many shards, each further shard takes as long as the one before
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
    """The requests that one rate limits (that of reads, or that of writes) since all replicas last waited for each other.

    All replicas send requests at the same time, so the last replica's request is served later than the first one's. That
    replica then takes its further steps later too, when the others are no longer in its way. So only the longest burst
    causes a delay, unless there are more requests than the store can serve in the whole time: then it serves them one
    after another without a pause.
    """

    def __init__(self) -> None:
        self._unhindered = self._served = self._rounds = self._burst = 0.0

    def add(self, unhindered: float, served: float, rounds: float) -> None:
        """Add requests.

        Args:
            unhindered: Seconds that one replica's requests take if no other replica uses the store.
            served: Seconds that the store needs to serve the requests of all replicas.
            rounds: The number of rounds, one after another, in which each replica sends its requests.
        """
        self._unhindered += unhindered
        self._served += served
        self._rounds += rounds
        self._burst = max(self._burst, served / rounds)

    @property
    def delay(self) -> float:
        """Seconds by which the rate limit delays the last replica."""
        if not self._rounds:
            return 0.0
        return max(self._burst, self._served + self._unhindered / self._rounds - self._unhindered)


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
        """Seconds until the last replica has finished all steps so far."""
        return self._passed + max(queue.delay for queue in self._queues)

    @property
    def longest_part(self) -> float:
        """Seconds of the longest part between two points at which all replicas wait for the last one."""
        return max(self._longest, self.seconds - self._met)

    def meet(self) -> None:
        """All replicas wait until the last one has come to this point, and need a moment to see that it has."""
        self._longest = self.longest_part
        self._passed = self._met = self.seconds + self.store.poll
        self._queues = _Queue(), _Queue()

    def ask(
        self,
        kind: str,
        count: float = 1,
        *,
        key: float = 0.0,
        keys: float = 0.0,
        content: float = 0.0,
        absent: bool = False,
        by: float | None = None,
        moved_by: float | None = None,
        times: float = 1.0,
        at_once: int = 1,
    ) -> None:
        """Send small requests.

        Args:
            kind: Their kind.
            count: How many requests a replica sends.
            key: The length of the key that each is about.
            keys: How many keys each is about; for LIST and DELETE.
            content: Bytes of a record that each moves.
            absent: Whether there is no such object.
            by: How many of the replicas send them while the others wait; all of them if left out.
            moved_by: The bytes of how many replicas count; of all that send them if left out.
            times: The share of syncs in which this happens; 1 for every sync.
            at_once: How many requests of a replica are under way at the same time.
        """
        if by != 0:
            rounds = math.ceil(count / at_once)
            around = self.store.around(kind, key, keys, absent=absent)
            self._step(
                kind,
                count,
                rounds * self._one(kind, content, around),
                rounds,
                around,
                count * content,
                by=by,
                moved_by=moved_by,
                times=times,
            )

    def list(
        self,
        keys: float,
        key: float,
        *,
        seen: float = 1.0,
        by: float | None = None,
        times: float = 1.0,
    ) -> None:
        """List this many keys of this length, page after page, or ``seen`` of them as a mean over the replicas."""
        pages = max(1, math.ceil(keys / self.store.page))
        self.ask("LIST", pages, key=key, keys=seen * keys / pages, by=by, times=times)

    def move(
        self, kind: str, count: float, key: float, keys: float = 0.0, *, absent: bool = False
    ) -> None:
        """Count the bytes of requests alone: they are sent while a replica waits anyway, and how many there are differs."""
        up, down = self.store.around(kind, key, keys, absent=absent)
        self.sent += count * up
        self.received += count * down

    def upload(self, size: float, key: float, at_once: int) -> None:
        """Write an object. A large one is written in parts, ``at_once`` of them at the same time."""
        around = self.store.around("PUT", key)
        if size < PART_BYTES:
            self._step("PUT", 1, self._one("PUT", size, around), 1, around, size)
            return
        parts = math.ceil(size / PART_BYTES)
        rounds = math.ceil(parts / at_once)
        # The last part is smaller. That matters only if it is the only one of its round.
        last_is_alone = (parts - 1) % at_once == 0
        last_size = size - (parts - 1) * PART_BYTES if last_is_alone else PART_BYTES
        seconds = (rounds - 1) * self._one("PUT", PART_BYTES, around)
        seconds += self._one("PUT", last_size, around)
        seconds = max(seconds, self.store.put + (size + parts * around[0]) / self.bandwidth)
        # One more request begins the upload, and one ends it.
        both = 2 * self._one("PUT", 0, around)
        self._step("PUT", parts + 2, seconds + both, 2 + rounds, around, size)

    def create(
        self, objects: float, size: float, key: float, at_once: int, times: float = 1.0
    ) -> None:
        """Create objects that must not exist yet: one request each, ``at_once`` of them at the same time."""
        around = self.store.around("PUT", key)
        rounds = _rounds(objects, at_once)
        seconds = max(
            rounds * self._one("PUT", size, around),
            self.store.put + objects * (size + around[0]) / self.bandwidth,
        )
        self._step("PUT", objects, seconds, rounds, around, objects * size, times=times)

    def read(self, ranges: Ranges, key: float, budget: float) -> None:
        """Read ranges of objects; ``budget`` is the memory in bytes for those that are under way."""
        if ranges.count:
            around = self.store.around("GET", key)
            at_once, round_seconds = self._reading(ranges, budget, around)
            rounds = _rounds(ranges.count, at_once)
            seconds = max(
                rounds * round_seconds,
                self.store.first_byte + (ranges.size + ranges.count * around[1]) / self.bandwidth,
            )
            self._step("GET", ranges.count, seconds, rounds, around, ranges.size)

    def update(
        self,
        shards: int,
        ranges: Ranges,
        key: float,
        published: float,
        published_key: float,
        at_once: int,
    ) -> None:
        """Read the contributions to a replica's shards. When a shard is updated, create its object in the background.

        Args:
            shards: How many shards the replica has.
            ranges: What is read for each shard.
            key: The length of the key of a contribution.
            published: Bytes of each object; objects take no memory from the reads.
            published_key: The length of its key.
            at_once: How many objects are under way at the same time.
        """
        reads, writes = self.store.around("GET", key), self.store.around("PUT", published_key)
        uploads = math.ceil(shards / at_once)
        self._step("PUT", shards, 0.0, uploads, writes, shards * published)
        rounds = shards * ranges.count / self._reading(ranges, self.transfer.budget_bytes, reads)[0]
        seconds = self._pipelined(
            shards, ranges, reads, self._one("PUT", published, writes), at_once
        )
        self._step("GET", shards * ranges.count, seconds, rounds, reads, shards * ranges.size)

    def _pipelined(
        self, shards: int, ranges: Ranges, around: tuple[float, float], upload: float, at_once: int
    ) -> float:
        """Seconds to read and upload some shards, one after another, where the uploads run in the background.

        ``upload`` is how many of them the upload of one takes.
        """
        if shards > _STEADY:
            first, second = (
                self._pipelined(count, ranges, around, upload, at_once)
                for count in (_STEADY // 2, _STEADY)
            )
            return second + (shards - _STEADY) * (second - first) / (_STEADY - _STEADY // 2)
        budget = self.transfer.budget_bytes
        together, round_seconds = self._reading(ranges, budget, around)
        per_byte = 0.0
        if ranges.count:
            moved = 1 + ranges.count * around[1] / ranges.size
            per_range = round_seconds / together
            per_byte = max(moved / self.bandwidth, per_range * ranges.count / ranges.size)
        # Moments, in seconds: when a shard's contributions are read, when it is updated, when it is uploaded.
        read = ranges.size * per_byte
        updated = max(read, _rounds(ranges.count, together) * round_seconds)
        uploaded: list[float] = []
        for number in range(shards):
            if number:
                # While it waits for an upload, a replica continues to read, as far as there is memory.
                read = max(
                    read + ranges.size * per_byte, updated + (ranges.size - budget) * per_byte
                )
                updated = max(read, updated)
            if number >= at_once:
                updated = max(updated, uploaded[number - at_once])
            uploaded.append(updated + upload)
        return uploaded[-1]

    def _reading(
        self, ranges: Ranges, budget: float, around: tuple[float, float]
    ) -> tuple[float, float]:
        """How many ranges are read at the same time, and how many seconds one such round takes."""
        connections = self.transfer.connections
        if not ranges.count:
            return connections, 0.0
        mean = ranges.size / ranges.count
        fitting = max(1, budget // ranges.largest) * ranges.largest / mean
        # Either the connections are the limit, or the memory: then small ranges, which take none, have to wait for large ones.
        limits = (
            (fitting, self._one("GET", ranges.largest, around)),
            (connections, self._one("GET", mean, around)),
        )
        return min(limits, key=lambda limit: limit[0] / limit[1])

    def _one(self, kind: str, content: float, around: tuple[float, float]) -> float:
        """Seconds of a request that moves so many bytes of an object, and what is around them."""
        bandwidth = min(self.store.connection_bandwidth, self.bandwidth)
        return self.store.latency(kind) + (content + sum(around)) / bandwidth

    def _step(
        self,
        kind: str,
        count: float,
        unhindered: float,
        rounds: float,
        around: tuple[float, float],
        content: float,
        *,
        by: float | None = None,
        moved_by: float | None = None,
        times: float = 1.0,
    ) -> None:
        """All replicas, or ``by`` of them, send requests of one kind, which takes each of them ``unhindered`` seconds.

        ``around`` is what each moves besides the content of objects, in both directions, and ``content`` how many bytes of
        objects all of them move. The other arguments are those of :meth:`ask`; ``rounds`` is as in :meth:`_Queue.add`.
        """
        senders = self.replicas if by is None else by
        self.requests[kind] += times * count * senders / self.replicas
        share = times * (senders if moved_by is None else moved_by) / self.replicas
        reads = kind in READS
        self.sent += share * (count * around[0] + (0.0 if reads else content))
        self.received += share * (count * around[1] + (content if reads else 0.0))
        self._passed += times * unhindered
        served = times * senders * count / self.store.rate(kind)
        self._queues[reads].add(times * unhindered, served, max(rounds, 1.0))


def _rounds(count: float, at_once: float) -> float:
    """The number of rounds in which ``count`` requests are sent, ``at_once`` at a time."""
    return count / at_once if count > _MANY * at_once else math.ceil(count / at_once)

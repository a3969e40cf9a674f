"""What an exchange will cost in time, bytes, requests and money, before a machine is paid for.

First principles: a replica moves its bytes at its bandwidth, through connections of their own speed, and every request
costs its latency; with enough connections the larger of the two counts. The figures of an S3-like store are the defaults.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ._checks import check_positive, check_whole
from ._errors import ConfigurationError

TOPOLOGIES = ("sharded", "gather")


@dataclass(frozen=True, slots=True)
class StoreModel:
    """How a store behaves, as one replica sees it.

    Attributes:
        connection_bandwidth: Bytes per second of one connection.
        connections: Requests under way at the same time.
        first_byte: Seconds from a GET to its first byte.
        put: Seconds that a PUT takes besides its transfer.
        poll: Seconds that pass until a replica notices that something is there.
        part_bytes: Bytes of one request at most.
        put_price: US dollars per PUT or LIST.
        get_price: US dollars per GET.
    """

    connection_bandwidth: float = 90e6
    connections: int = 256
    first_byte: float = 0.025
    put: float = 0.040
    poll: float = 0.25
    part_bytes: int = 16 * 2**20
    put_price: float = 5e-6
    get_price: float = 4e-7

    def __post_init__(self) -> None:
        for name in ("connection_bandwidth", "connections", "part_bytes"):
            check_positive(name, getattr(self, name))

    def seconds(self, objects: int, size: float, latency: float, bandwidth: float) -> float:
        """Time to move so many objects of one size, in bytes, at the same time."""
        if not objects or not size:
            return 0.0
        parts = objects * self.parts(size)
        rounds = math.ceil(parts / self.connections)
        part = min(size, self.part_bytes) / self.connection_bandwidth
        return max(latency + objects * size / bandwidth, rounds * (latency + part))

    def parts(self, size: float) -> int:
        """Requests for one object."""
        return math.ceil(size / self.part_bytes)


@dataclass(frozen=True, slots=True)
class ExchangePlan:
    """What one sync costs one replica, and the cohort.

    Attributes:
        topology: ``"sharded"`` (owners update and publish) or ``"gather"`` (everybody reads everybody).
        seconds: Time from the last contribution's start to the end, without waiting for stragglers.
        bytes_sent: Bytes that a replica writes: its contribution, and its part of the published state with the outer state.
        bytes_received: Bytes that a replica reads.
        puts: Write requests of a replica.
        gets: Read requests of a replica.
        cost: US dollars for the requests of the whole cohort.
        memory_bytes: Outer side's memory of a replica (the fp32 local and global copy, outer state), buffers left out.
    """

    topology: str
    seconds: float
    bytes_sent: float
    bytes_received: float
    puts: int
    gets: int
    cost: float
    memory_bytes: float

    def blocked(self, period: float) -> float:
        """Share of the time spent in syncs, if a sync comes after every ``period`` seconds of training."""
        return self.seconds / (self.seconds + period)


def plan_exchange(
    params: float,
    replicas: int,
    bandwidth: float,
    *,
    bytes_per_param: float = 4.0,
    outer_state: float = 1.0,
    topology: str = "auto",
    strict: bool = False,
    publish_every: int = 4,
    store: StoreModel | None = None,
) -> ExchangePlan:
    """Foresee one sync of all parameters, as it is when no replica is late.

    Args:
        params: Number of parameters that are synced.
        replicas: Number of replicas.
        bandwidth: Bytes per second that one replica can move, such as 12.5e9 for a network card of 100 Gb/s.
        bytes_per_param: Bytes of a parameter on the wire: 4 for models in fp32 and narrower dtypes, 8 for float64.
        outer_state: Tensors that the outer optimizer keeps of every parameter, which are published with it: 1 for SGD with
            momentum, 0 without, 2 for Adam.
        topology: ``"sharded"``, ``"gather"``, or ``"auto"`` for the quicker one. Strict runs are always sharded.
        strict: Whether membership is strict: then nobody sends the part of its contribution that it uses itself.
        publish_every: In the gather topology, every how many syncs the state is published; bytes and seconds are means.
        store: How the store behaves; an S3-like one by default.

    Returns:
        The plan of the topology.

    Raises:
        ConfigurationError: An argument is impossible.
    """
    store = store or StoreModel()
    for name, value in (("params", params), ("bandwidth", bandwidth), ("bytes_per_param", bytes_per_param)):
        check_positive(name, value)
    check_whole("replicas", replicas)
    check_whole("publish_every", publish_every)
    if isinstance(outer_state, bool) or not isinstance(outer_state, (int, float)) or not 0 <= outer_state < math.inf:
        raise ConfigurationError(f"outer_state must be a number of tensors, 0 or more, not {outer_state!r}")
    if not isinstance(strict, bool):
        raise ConfigurationError(f"strict must be True or False, not {strict!r}")
    if strict and topology == "gather":
        raise ConfigurationError("strict runs are sharded: topology='gather' is for elastic ones")
    if topology not in {"auto", *TOPOLOGIES}:
        raise ConfigurationError(f"topology must be 'auto', 'sharded' or 'gather', not {topology!r}")
    state = bytes_per_param * (1 + outer_state)
    plans = [_sharded(params, replicas, bandwidth, bytes_per_param, state, strict, store)]
    if not strict:
        plans.append(_gather(params, replicas, bandwidth, bytes_per_param, state, publish_every, store))
    wanted = [plan for plan in plans if topology in {"auto", plan.topology}]
    return min(wanted, key=lambda plan: plan.seconds)


def _sharded(
    params: float, n: int, bandwidth: float, width: float, state: float, strict: bool, store: StoreModel
) -> ExchangePlan:
    # An elastic member sends all of its contribution, so that another may take over its shard.
    delta, shard, others = params * width * ((n - 1) / n if strict else 1), params * width / n, n - 1
    published = params * state / n
    up = store.seconds(1, delta, store.put, bandwidth)
    fetch = store.seconds(others, shard, store.first_byte, bandwidth)
    publish = store.seconds(1, published, store.put, bandwidth)
    puts = store.parts(delta) + store.parts(published)
    gets = 2 * others * store.parts(shard)
    return ExchangePlan(
        "sharded",
        up + publish + 2 * (fetch + store.poll),
        delta + published,
        2 * others * shard,
        puts,
        gets,
        n * (puts * store.put_price + gets * store.get_price),
        params * (4 + width + (state - width) / n),
    )


def _gather(
    params: float, n: int, bandwidth: float, width: float, state: float, publish_every: int, store: StoreModel
) -> ExchangePlan:
    delta, others = params * width, n - 1
    published = params * state / n
    up = store.seconds(1, delta, store.put, bandwidth)
    fetch = store.seconds(others, delta, store.first_byte, bandwidth)
    publish = store.seconds(1, published, store.put, bandwidth) / publish_every
    puts = store.parts(delta) + math.ceil(store.parts(published) / publish_every)
    gets = others * store.parts(delta)
    return ExchangePlan(
        "gather",
        up + fetch + publish + store.poll,
        delta + published / publish_every,
        others * delta,
        puts,
        gets,
        n * (puts * store.put_price + gets * store.get_price),
        params * (4 + state),
    )

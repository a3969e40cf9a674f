"""The planner reproduces, from first principles, the published table of an S3-like store."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diloco_core import (
    ConfigurationError,
    DiLoCo,
    Elastic,
    ElasticExchange,
    ObjectStoreExchange,
    StoreModel,
    plan_exchange,
)
from diloco_core._elastic_settings import choose_topology
from diloco_core._store import open_store

#: What a network card of 100 Gb/s moves of payload, in bytes per second.
NIC = 11.65e9

#: Parameters, replicas → seconds of the gather topology and of the sharded one, fp32, without outer state or publication.
TABLE = {
    (125e6, 4): (0.7, 1.3),
    (125e6, 64): (3.2, 1.1),
    (125e6, 1000): (43, 1.1),
    (1e9, 4): (1.6, 1.6),
    (1e9, 64): (22, 1.8),
    (1e9, 1000): (344, 1.8),
    (7e9, 4): (10, 7.3),
    (7e9, 64): (154, 8.0),
    (7e9, 1000): (2403, 8.1),
    (70e9, 4): (97, 68),
    (70e9, 64): (1539, 73),
    (70e9, 1000): (24031, 74),
}


@pytest.mark.parametrize(("size", "seconds"), TABLE.items(), ids=[f"{p / 1e9:g}B-{n}" for p, n in TABLE])
def test_the_table(size, seconds):
    options = {"outer_state": 0.0, "publish_every": 10**6}
    found = [plan_exchange(*size, NIC, topology=topology, **options).seconds for topology in ("gather", "sharded")]
    assert found == pytest.approx(seconds, rel=0.1)


def test_narrower_formats():
    for width, seconds in ((2, 4.4), (1, 2.6)):
        found = plan_exchange(7e9, 64, NIC, bytes_per_param=width, outer_state=0, topology="sharded").seconds
        assert found == pytest.approx(seconds, rel=0.1)


def test_the_price_of_requests():
    assert plan_exchange(7e9, 64, NIC, outer_state=0, topology="sharded").cost == pytest.approx(0.63, rel=0.02)


def test_auto_is_the_quicker_one():
    assert plan_exchange(125e6, 4, NIC).topology == "gather"
    assert plan_exchange(7e9, 64, NIC).topology == "sharded"


@given(st.floats(1e3, 1e12), st.integers(2, 2000), st.floats(1e6, 1e11))
def test_bytes_stay_flat_in_the_sharded_topology(params, replicas, bandwidth):
    plan = plan_exchange(params, replicas, bandwidth, topology="sharded")
    delta = 4 * params
    assert plan.bytes_sent == pytest.approx(delta * (1 + 2 / replicas)), "parameters and momentum of a shard"
    assert plan.bytes_received == pytest.approx(2 * delta * (replicas - 1) / replicas)
    assert plan.seconds >= (plan.bytes_sent + plan.bytes_received) / bandwidth * 0.999
    assert 0 < plan.blocked(60.0) < 1


@given(st.floats(1e3, 1e12), st.integers(1, 500), st.floats(1e6, 1e11), st.floats(1.0, 100.0))
def test_more_bandwidth_is_never_slower(params, replicas, bandwidth, factor):
    for topology in ("gather", "sharded"):
        slow, fast = (plan_exchange(params, replicas, b, topology=topology) for b in (bandwidth, bandwidth * factor))
        assert fast.seconds <= slow.seconds


def test_alone_there_is_nothing_to_fetch():
    plan = plan_exchange(1e6, 1, 1e9)
    assert (plan.bytes_received, plan.gets) == (0, 0)


@pytest.mark.parametrize(
    ("params", "replicas", "topology"),
    [
        (1e6, 1, "gather"),
        (1e6, 4, "gather"),
        (25e6, 4, "gather"),
        (1e8, 8, "sharded"),
        (1e9, 4, "sharded"),
        (1e7, 64, "sharded"),
    ],
)
def test_the_topology_that_a_run_chooses(params, replicas, topology):
    def choose(asked, near):
        return choose_topology(asked, state_bytes=int(4 * params), world_size=replicas, near=near)

    assert choose("auto", near=False) == topology
    assert choose("auto", near=True) == "sharded"
    assert (choose("gather", near=True), choose("sharded", near=False)) == ("gather", "sharded")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ((0, 2, 1e9), "params"),
        ((1e6, 0, 1e9), "replicas"),
        ((1e6, 2.5, 1e9), "replicas"),
        ((1e6, 2, -1), "bandwidth"),
        ((1e6, 2, math.inf), "bandwidth"),
        ((1e6, 2, "fast"), "bandwidth"),
    ],
)
def test_impossible_arguments(arguments, word):
    with pytest.raises(ConfigurationError, match=word):
        plan_exchange(*arguments)


class Counting:
    """A store that counts payload bytes."""

    def __init__(self, store):
        self._store = store
        self.sent = self.received = 0

    def __getattr__(self, name):
        return getattr(self._store, name)

    def put(self, key, parts):
        size = self._store.put(key, parts)
        self.sent += size * key.endswith(".safetensors")
        return size

    def create(self, key, data):
        if isinstance(data, bytes):
            return self._store.create(key, data)
        parts = [bytes(part) for part in data]
        created = self._store.create(key, parts)
        self.sent += sum(map(len, parts)) * created
        return created

    def open(self, key, size=None):
        reader = self._store.open(key, size)
        read_into = reader.read_into

        def counted(offset, buffer):
            self.received += len(buffer)
            read_into(offset, buffer)

        reader.read_into = counted
        return reader


class TestCounted:
    """What is planned and what is reported is what a store sees."""

    @pytest.mark.parametrize("kind", ["strict", "sharded", "gather"])
    @pytest.mark.parametrize(
        ("replicas", "optimizer", "outer_state"),
        [(n, "momentum", 1.0) for n in (1, 2, 8)] + [(3, "plain", 0.0), (3, "Adam", 2.0)],
    )
    def test_bytes(self, lab, tmp_path, kind, replicas, optimizer, outer_state):
        params, cycles = 24_000, 2
        outer = {
            "plain": {"outer_momentum": 0.0},
            "momentum": {},
            "Adam": {"outer_optimizer": partial(torch.optim.Adam, lr=0.1)},
        }[optimizer]
        stores = [Counting(open_store(str(tmp_path))) for _ in range(replicas)]
        seen, reports = [[] for _ in stores], [[] for _ in stores]

        def replica(exchange):
            model = torch.nn.ParameterList([torch.ones(params)])
            inner = torch.optim.SGD(model.parameters(), lr=1.0)

            def count(report):
                store = stores[exchange.rank]
                seen[exchange.rank].append((store.sent, store.received))
                reports[exchange.rank].append(report)

            with DiLoCo(model, inner, exchange, sync_every=1, on_sync=count, **outer):
                # A sync is planned as it is in the middle of a run, with the outer state there.
                for step in range(2 + 2 * cycles):
                    lab.push(model, inner, exchange.rank, step)

        lab.run(replica, [self.exchange(kind, store, rank, replicas) for rank, store in enumerate(stores)])
        for rank in range(replicas):
            first, last = seen[rank][1], seen[rank][-1]
            counted = [last[i] - first[i] for i in (0, 1)]
            reported = [sum(r.bytes_sent for r in reports[rank][2:]), sum(r.bytes_received for r in reports[rank][2:])]
            assert reported == pytest.approx(counted, rel=0.02, abs=1000 * cycles)
        plan = plan_exchange(
            params,
            replicas,
            1e9,
            topology="gather" if kind == "gather" else "sharded",
            strict=kind == "strict",
            outer_state=outer_state,
            publish_every=2,
        )
        mean = [sum(seen[r][-1][i] - seen[r][1][i] for r in range(replicas)) / replicas / 2 / cycles for i in (0, 1)]
        assert mean == pytest.approx([plan.bytes_sent, plan.bytes_received], rel=0.03, abs=3000)

    @staticmethod
    def exchange(kind, store, rank, replicas):
        if kind == "strict":
            return ObjectStoreExchange(store, rank, replicas)
        return ElasticExchange(store, rank, replicas, Elastic(replicas, topology=kind, publish_every=2))


def test_impossible_options():
    with pytest.raises(ConfigurationError, match="outer_state must be a number of tensors, 0 or more, not -1"):
        plan_exchange(1e6, 2, 1e9, outer_state=-1)
    with pytest.raises(ConfigurationError, match="publish_every"):
        plan_exchange(1e6, 2, 1e9, publish_every=0)
    with pytest.raises(ConfigurationError, match="strict must be True or False, not 'yes'"):
        plan_exchange(1e6, 2, 1e9, strict="yes")
    with pytest.raises(ConfigurationError, match="strict runs are sharded"):
        plan_exchange(1e6, 2, 1e9, strict=True, topology="gather")
    with pytest.raises(ConfigurationError, match="'auto', 'sharded' or 'gather'"):
        plan_exchange(1e6, 2, 1e9, topology="ring")
    with pytest.raises(ConfigurationError, match="connections"):
        StoreModel(connections=0)

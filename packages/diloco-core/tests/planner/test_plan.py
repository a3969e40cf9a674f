"""Test what the planner says before anything is run."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_core import ConfigurationError, StoreModel, Transfer, plan_exchange
from diloco_core._store._transfer import BLOCK_BYTES, PART_BYTES

MIB = 2**20

NIC = 1.25e9
"""What a network card of 10 Gb/s moves, in bytes per second."""
UNLIMITED = StoreModel(reads=None, writes=None)
SHARD_BYTES = 16 * MIB
KINDS = [{"fixed": True}, {"topology": "sharded"}, {"topology": "gather"}]
unhurried = settings(deadline=None, max_examples=40)  # load is no failure


def sharded(params, replicas, **options):
    return plan_exchange(params, replicas, NIC, topology="sharded", **options)


class TestByHand:
    """Small cases that can be computed on paper."""

    STORE = StoreModel(
        1e8, 0.01, put=0.02, poll=0.5, reads=None, writes=None, put_price=1, get_price=0.1
    )

    def test_a_fixed_sync_of_two(self):
        """A contribution of 1 MB for the other one, and a published shard of 2 MB, plus headers."""
        plan = plan_exchange(5e5, 2, NIC, fixed=True, store=self.STORE)
        looked = 3 / 8  # the manifest, its copy and the own claim, in one of eight syncs
        # The record and the next claim in vain; then the record, by one more for the other one's
        # sake; then the next in vain.
        record = 2 + 1 + 1 / 2 + 1
        assert plan.gets == record + looked + 1 + 1
        # Of contributions and of shards, by the one that is ahead once more; and what is kept of
        # both, by one of the two.
        assert (plan.lists, plan.deletes) == (1 + 1 + 1 / 2 + 2 / 2, 1 / 2)
        beats = plan.seconds / 10
        assert plan.puts == pytest.approx(1 + 1 + 1 + 1 / 2 + beats)
        sent = 2 * 0.01 + 0.02 + 1e6 / 1e8
        committed = 0.5 + 0.01 + 0.02 + 0.01 + 0.01 + looked * 0.01
        reduced, published = 0.01 + 1e6 / 1e8, 0.02 + 2e6 / 1e8
        adopted, removed = 0.5 + 0.01 + 0.01 + 1e6 / 1e8 + 0.01, 2 * 0.01 + 0.02
        assert plan.seconds == pytest.approx(
            sent + committed + reduced + published + adopted + 0.02 + removed, rel=1e-3
        )
        assert plan.cost == pytest.approx(2 * (plan.puts + plan.lists + 0.1 * plan.gets))
        assert plan.memory_bytes == 2e6 + 2e6 + 1e6

    @pytest.mark.parametrize("options", KINDS)
    def test_a_fragment_costs_as_much_as_a_model_of_its_size(self, options):
        """Except for the memory, which holds all fragments."""
        plan = plan_exchange(2e6, 4, NIC, fragments=4, store=self.STORE, **options)
        small = plan_exchange(5e5, 4, NIC, store=self.STORE, **options)
        assert plan == replace(small, memory_bytes=4 * small.memory_bytes)

    def test_large_objects_go_up_in_parts_and_come_down_in_ranges(self):
        plan = plan_exchange(4 * PART_BYTES, 2, NIC, fixed=True, store=self.STORE)
        shards = 6  # of at most 16 MiB each, as many for each rank
        parts = math.ceil((8 * PART_BYTES + 1) / PART_BYTES)
        beats = plan.seconds / 10
        # The contribution has a beginning and an end, and each shard goes up at once.
        assert plan.puts == pytest.approx(parts + 2 + 1 + shards / 2 + 1 / 2 + beats)
        # The checksums of a contribution come first; those of a shard lie behind its values.
        values = 16 * PART_BYTES / shards
        sent, published = math.ceil(values / BLOCK_BYTES) + 1, math.ceil((values + 1) / BLOCK_BYTES)
        assert published > 1
        assert plan.gets == 4.5 + 3 / 8 + shards / 2 * (sent + published)


@pytest.mark.parametrize("options", KINDS)
def test_telemetry_goes_by_the_clock(options):
    """Every 10 s and once a minute in small runs; 10 requests per second of all in large ones.

    And three at the end of each replica.
    """
    store = StoreModel(put_price=5e-6)
    small, large = (plan_exchange(1e8, size, NIC, store=store, **options) for size in (4, 10_000))
    assert small.telemetry_puts == 86_400 / 10 + 86_400 / 60 + 3
    assert small.telemetry_cost == pytest.approx(4 * small.telemetry_puts * 5e-6)
    assert large.telemetry_puts * 10_000 == pytest.approx(10 * 86_400 + 3 * 10_000)
    assert large.telemetry_cost == pytest.approx((10 * 86_400 + 3 * 10_000) * 5e-6)
    other = plan_exchange(2e9, 4, NIC, store=store, fragments=8, **options)
    assert other.telemetry_puts == small.telemetry_puts


@pytest.mark.parametrize("options", KINDS)
def test_what_a_replica_may_set(options):
    """More connections are quicker, and larger blocks are fewer requests."""
    slow = plan_exchange(1e8, 8, 1e11, store=UNLIMITED, **options)
    many = Transfer(connections=64, budget_bytes=512 * MIB)
    fast = plan_exchange(1e8, 8, 1e11, store=UNLIMITED, transfer=many, **options)
    assert fast.seconds < 0.7 * slow.seconds
    assert (fast.gets, fast.puts) == pytest.approx((slow.gets, slow.puts), rel=0.01)
    small = plan_exchange(1e9, 4, NIC, **options)
    large = plan_exchange(1e9, 4, NIC, transfer=Transfer(block_bytes=32 * MIB), **options)
    assert large.gets < 0.6 * small.gets
    assert large.bytes_received == small.bytes_received


def test_where_memory_begins_to_limit_the_reads_there_is_no_jump():
    """Memory can be the limit although a range for each connection fits into it."""
    store = StoreModel(9e7, first_byte=0.03, put=0.03, poll=0.0, reads=None, writes=None)
    seconds = [
        plan_exchange(params * 1e6, 256, NIC, fixed=True, store=store).seconds
        for params in range(980, 1030, 2)
    ]
    assert all(before < after < 1.02 * before for before, after in pairwise(seconds))
    counted = 17.3  # by tools/bench/scale, with 1,007 million parameters
    plan = plan_exchange(1.007e9, 256, NIC, fixed=True, store=store)
    assert plan.seconds == pytest.approx(counted, rel=0.05)


class TestTheRateOfAPrefix:
    def test_it_takes_as_long_as_the_prefix_needs(self):
        """1,000 replicas read all of 1,000 shards, once as contributions and once as published."""
        plan = plan_exchange(1e6, 1000, NIC, fixed=True)
        assert plan.seconds > 1000 * plan.gets / 5500 > 300
        assert plan_exchange(1e6, 1000, NIC, fixed=True, store=UNLIMITED).seconds < 10

    def test_writes_have_a_rate_of_their_own(self):
        stores = [StoreModel(reads=None, writes=rate) for rate in (10.0, 1e6)]
        slow, fast = (sharded(1e8, 64, store=store) for store in stores)
        assert slow.seconds > fast.seconds + 64 * (sharded(1e8, 64).puts - 2) / 10

    def test_large_ranges_help_where_reads_are_limited(self):
        store = StoreModel(reads=500.0)
        slow = plan_exchange(1e9, 64, NIC, fixed=True, store=store)
        large = Transfer(block_bytes=64 * MIB, budget_bytes=512 * MIB)
        plan = plan_exchange(1e9, 64, NIC, fixed=True, store=store, transfer=large)
        assert plan.seconds < slow.seconds / 1.5


def test_auto_is_the_quicker_one():
    for params in (1e6, 1e7, 1e8):
        for replicas in (2, 4, 16, 64):
            plans = {
                name: plan_exchange(params, replicas, NIC, topology=name)
                for name in ("sharded", "gather")
            }
            chosen = plan_exchange(params, replicas, NIC)
            assert chosen == plans[chosen.topology]
            assert chosen.seconds == min(plan.seconds for plan in plans.values())


@unhurried
@given(st.floats(1e3, 1e12), st.integers(2, 2000), st.floats(1e6, 1e11))
def test_bytes_stay_flat_in_the_sharded_topology(params, replicas, bandwidth):
    plan = plan_exchange(params, replicas, bandwidth, topology="sharded")
    delta = 4 * params
    headers = 512 * (64 + delta / SHARD_BYTES + replicas)  # those of files, and records
    assert delta * (1 + 2 / replicas) <= plan.bytes_sent <= delta * (1 + 2 / replicas) + 4 * headers
    values = 2 * delta * (replicas - 1) / replicas
    assert values <= plan.bytes_received <= values + headers
    assert plan.seconds >= (plan.bytes_sent - plan.bytes_received) / bandwidth * 0.999
    assert plan.seconds >= plan.bytes_received / bandwidth * 0.999
    assert 0 < plan.blocked(60.0) < 1
    assert plan.blocked(60.0, 0.0) == plan.blocked(60.0)
    assert plan.blocked(2 * plan.seconds, plan.seconds) == 0
    half = plan.blocked(2 * plan.seconds, plan.seconds / 2)
    assert half == pytest.approx(0.2), "half a sync in two and a half"


@unhurried
@given(st.floats(1e3, 1e12), st.integers(1, 500), st.floats(1e6, 1e11), st.floats(1.0, 100.0))
def test_more_bandwidth_is_never_slower(params, replicas, bandwidth, factor):
    for topology in ("gather", "sharded"):
        slow, fast = (
            plan_exchange(params, replicas, b, topology=topology)
            for b in (bandwidth, bandwidth * factor)
        )
        assert fast.seconds <= slow.seconds


def test_a_sync_is_hidden_as_long_as_training_goes_on_beside_it():
    plan = plan_exchange(1e8, 4, 1e9)
    assert (plan.exposed(), plan.hidden()) == (plan.seconds, 0)
    third = plan.seconds / 3
    assert plan.hidden(third) == pytest.approx(third)
    assert plan.exposed(third) == pytest.approx(2 * third)
    assert (plan.exposed(2 * plan.seconds), plan.hidden(2 * plan.seconds)) == (0, plan.seconds)
    for overlap, message in ((-1.0, "0 or more"), (float("nan"), "finite"), ("1", "finite")):
        for ask in (plan.exposed, plan.hidden):
            with pytest.raises(ConfigurationError, match=f"overlap .*{message}"):
                ask(overlap)
    for period in (-1.0, "60", float("nan")):
        with pytest.raises(ConfigurationError, match=r"^period "):
            plan.blocked(period)
    for overlap in (-1.0, 61.0):
        with pytest.raises(ConfigurationError, match="from 0 to the period of 60 s"):
            plan.blocked(60.0, overlap)


@pytest.mark.parametrize("fixed", [True, False])
def test_what_leaves_the_region_is_paid_by_the_byte(fixed):
    """The price counts all that replicas read, and nothing that they write."""
    inside = plan_exchange(1e8, 4, 1e9, fixed=fixed)
    outside = plan_exchange(1e8, 4, 1e9, fixed=fixed, store=StoreModel(egress_price=9e-11))
    assert outside.cost - inside.cost == pytest.approx(4 * inside.bytes_received * 9e-11)
    assert outside == replace(inside, cost=outside.cost)


@pytest.mark.parametrize("connections", [1, 16, 64])
@pytest.mark.parametrize("options", KINDS)
def test_a_link_carries_no_more_than_it_can(options, connections):
    """Also while several uploads are under way."""
    for bandwidth in (1e6, 1e8, 1e9):
        for replicas in (1, 2, 4):
            transfer = Transfer(connections, budget_bytes=512 * MIB)
            plan = plan_exchange(1e9, replicas, bandwidth, transfer=transfer, **options)
            assert plan.seconds >= max(plan.bytes_sent, plan.bytes_received) / bandwidth

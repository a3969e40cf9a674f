"""The planner reproduces, from first principles, the published table of an S3-like store."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_core import ConfigurationError, StoreModel, plan_exchange
from diloco_core._elastic_settings import choose_topology

#: What a network card of 100 Gb/s moves of payload, in bytes per second.
NIC = 11.65e9

#: Parameters, replicas → seconds of the gather topology and of the sharded one, fp32.
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
    found = [plan_exchange(*size, NIC, topology=topology).seconds for topology in ("gather", "sharded")]
    assert found == pytest.approx(seconds, rel=0.1)


def test_narrower_formats():
    for width, seconds in ((2, 4.4), (1, 2.6)):
        found = plan_exchange(7e9, 64, NIC, bytes_per_param=width, topology="sharded").seconds
        assert found == pytest.approx(seconds, rel=0.1)


def test_the_price_of_requests():
    assert plan_exchange(7e9, 64, NIC, topology="sharded").cost == pytest.approx(0.63, rel=0.02)


def test_auto_is_the_quicker_one():
    assert plan_exchange(125e6, 4, NIC).topology == "gather"
    assert plan_exchange(7e9, 64, NIC).topology == "sharded"


@given(st.floats(1e3, 1e12), st.integers(2, 2000), st.floats(1e6, 1e11))
def test_bytes_stay_flat_in_the_sharded_topology(params, replicas, bandwidth):
    plan = plan_exchange(params, replicas, bandwidth, topology="sharded")
    delta = 4 * params
    assert plan.bytes_sent == pytest.approx(delta * (1 + 1 / replicas))
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


def test_impossible_options():
    with pytest.raises(ConfigurationError, match="'auto', 'sharded' or 'gather'"):
        plan_exchange(1e6, 2, 1e9, topology="ring")
    with pytest.raises(ConfigurationError, match="connections"):
        StoreModel(connections=0)

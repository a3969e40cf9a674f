"""The mean without the largest and smallest values of every element, over every exchange."""

import pytest
import torch
from delay_lab import exchanges
from hypothesis import given
from hypothesis import strategies as st
from training_lab import run

from diloco_core import (
    ConfigurationError,
    DiLoCo,
    Elastic,
    ManagerExchange,
    MismatchError,
    MockManager,
    StoreExchange,
    in_process,
)
from diloco_core._codecs._named import find_codec
from diloco_core._store._open import open_store
from diloco_core.testing import run_replicas

KINDS = ["threads", "store", "sharded", "gather"]


def train(exchange, learned, delay=0, **options):
    """Plain averaging of what the replicas have learned; the parameters at the end."""
    model = torch.nn.ParameterList([torch.zeros(len(learned[0]), dtype=torch.float64)])
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    options = {"sync_every": 2, "outer_lr": 1.0, "outer_momentum": 0.0, **options}
    with DiLoCo(model, inner, exchange, delay=delay, flush="none", **options):
        for step in range(2):
            # With a delay, only the first step is sent.
            sent = torch.tensor(learned[exchange.rank], dtype=torch.float64)
            model[0].grad = sent if step == 0 else torch.zeros_like(sent)
            inner.step()
    return model[0].detach().clone()


def by_the_definition(learned, trim, codec):
    """Element by element, in plain Python."""
    sent = []
    for each in learned:
        values = torch.tensor(each, dtype=torch.float64)
        decoded = torch.empty_like(values)
        find_codec(codec).decode(find_codec(codec).encode(values), decoded)
        sent.append(decoded.tolist())
    means = []
    for values in zip(*sent, strict=True):
        left = sorted(values)[trim : len(values) - trim]
        means.append(-sum(left) / len(left))
    return torch.tensor(means, dtype=torch.float64)


@st.composite
def cases(draw):
    trim = draw(st.integers(1, 2))
    replicas = draw(st.integers(2 * trim + 1, 5))
    values = st.one_of(st.integers(-3, 3), st.floats(-1e6, 1e6))
    size = draw(st.integers(1, 40))
    one = st.lists(values, min_size=size, max_size=size)
    return trim, draw(st.lists(one, min_size=replicas, max_size=replicas))


@given(
    cases(),
    st.sampled_from(KINDS),
    st.sampled_from(["plain", "bf16", "int8"]),
    st.sampled_from([0, 1]),
)
def test_every_element_is_the_mean_of_those_that_are_left(case, kind, codec, delay):
    trim, learned = case
    options = {"aggregate": "trimmed", "trim": trim, "codec": codec, "delay": delay}
    found = run(lambda exchange: train(exchange, learned, **options), exchanges(kind, len(learned)))
    wanted = by_the_definition(learned, trim, codec)
    for values in found:
        assert torch.allclose(values, wanted, rtol=1e-12, atol=1e-9)
        assert torch.equal(values, found[0])


def test_one_value_at_either_end_is_left_out_if_nothing_else_is_said():
    learned = [[-1e9], [1.0], [2.0], [1e9]]
    for values in run(lambda each: train(each, learned, aggregate="trimmed"), in_process(4)):
        assert values.item() == -1.5


def lone(exchange=None, **options):
    model = torch.nn.Linear(2, 2)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    return DiLoCo(model, inner, exchange or in_process(5)[0], sync_every=2, **options)


@pytest.mark.parametrize("aggregate", ["RDA", "rfa", "krum", "multi-krum", "geometric-median"])
def test_rules_that_are_not_local_to_a_shard_are_refused(aggregate):
    with pytest.raises(ConfigurationError, match="inner products of whole tensors"):
        lone(aggregate=aggregate)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"aggregate": "median"}, "aggregate='median' is not offered.*clip='median'"),
        ({"aggregate": None}, "aggregate must be one of 'mean', 'trimmed'"),
        ({"trim": 1}, "aggregate='mean' leaves nothing out"),
        ({"aggregate": "trimmed", "trim": 0}, "trim must be"),
        ({"aggregate": "trimmed", "trim": 0.1}, "trim must be"),
        ({"aggregate": "trimmed", "trim": 3}, "at least 7 replicas .* world_size is 5"),
        ({"aggregate": "trimmed", "weight": "steps"}, "cannot be used with weight='steps'"),
    ],
)
def test_what_does_not_fit(options, message):
    with pytest.raises(ConfigurationError, match=message):
        lone(**options)


def test_a_manager_takes_plain_means():
    manager = ManagerExchange(MockManager(in_process(3)[0]), world_size=3)
    with pytest.raises(ConfigurationError, match="aggregate='trimmed' cannot be used with Manager"):
        lone(manager, aggregate="trimmed")


@pytest.mark.parametrize(("fewest", "fits"), [(2, False), (3, True)])
def test_in_elastic_runs_enough_replicas_take_part_in_every_sync(tmp_path, fewest, fits):
    exchange = StoreExchange(open_store(str(tmp_path)), 0, 4, Elastic(fewest))
    if fits:
        assert lone(exchange, aggregate="trimmed")
    else:
        with pytest.raises(ConfigurationError, match=r"at least 3 replicas .* min_replicas is 2"):
            lone(exchange, aggregate="trimmed")


@pytest.mark.parametrize("kind", ["threads", "store"])
def test_replicas_that_trim_differently_are_refused(kind):
    def replica(exchange):
        aggregate = ["mean", "trimmed", "trimmed"][exchange.rank]
        train(exchange, [[1.0]] * 3, aggregate=aggregate)

    results = run_replicas(replica, exchanges(kind, 3))
    assert any(isinstance(error, MismatchError) and "trim" in str(error) for error in results)

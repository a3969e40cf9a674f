"""How much each replica's contribution counts, over every exchange, by the formulas."""

import json
from fractions import Fraction

import pytest
import torch
from delay_lab import exchanges
from hypothesis import given
from hypothesis import strategies as st
from simulated import Schedule, SimulatedTraining, simulate, violations
from training_lab import run

from diloco_core import (
    ConfigurationError,
    DiLoCo,
    Elastic,
    ManagerExchange,
    MismatchError,
    MockManager,
    StoreExchange,
    SyncError,
    in_process,
)
from diloco_core._codecs._named import find_codec
from diloco_core._store._open import open_store
from diloco_core.testing import run_replicas

KINDS = ["threads", "store", "sharded", "gather"]
SIZE = 37
EVERY = 3


def gradient(rank, step):
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(SIZE, generator=generator, dtype=torch.float64)


def weigh(weight, steps, tokens):
    """The weight by its definition, in exact numbers."""
    return {
        "equal": Fraction(1),
        "steps": Fraction(steps),
        "tokens": Fraction(tokens**2, steps) if steps else Fraction(0),
    }[weight]


def near(weights, wanted):
    return weights == pytest.approx([float(each) for each in wanted], rel=1e-15)


def train(exchange, tokens, weight, steps=2 * EVERY, **options):
    """Plain averaging: the parameters move by the weighted mean of what the replicas learned."""
    reports = []
    model = torch.nn.ParameterList([torch.zeros(SIZE, dtype=torch.float64)])
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    options = {"sync_every": EVERY, "outer_lr": 1.0, "outer_momentum": 0.0, **options}
    with DiLoCo(model, inner, exchange, weight=weight, on_sync=reports.append, **options) as outer:
        for step in range(steps):
            model[0].grad = gradient(exchange.rank, step)
            if weight == "tokens":
                outer.count_tokens(tokens[exchange.rank][step])
            inner.step()
    return model[0].detach().clone(), reports


def by_the_formulas(tokens, weight, steps, codec="plain", every=EVERY):
    """The parameters at the end, and the shares of every sync."""
    replicas, values, shares = len(tokens), torch.zeros(SIZE, dtype=torch.float64), []
    for first in range(0, max(steps), every):
        learned, weights = [], []
        for rank in range(replicas):
            taken = range(first, min(first + every, steps[rank]))
            delta = sum((gradient(rank, step) for step in taken), torch.zeros_like(values))
            decoded = torch.empty_like(delta)
            find_codec(codec).decode(find_codec(codec).encode(delta), decoded)
            learned.append(decoded)
            counted = sum(tokens[rank][step] for step in taken)
            weights.append(weigh(weight, len(taken), counted))
        shares.append([each / sum(weights) for each in weights])
        values = values - sum(
            float(a) * decoded for a, decoded in zip(shares[-1], learned, strict=True)
        )
    return values, shares


@st.composite
def counted(draw):
    replicas = draw(st.integers(1, 3))
    numbers = st.lists(st.sampled_from([1, 2, 7, 4096, 10**9]), min_size=6, max_size=6)
    return draw(st.lists(numbers, min_size=replicas, max_size=replicas))


@given(
    counted(),
    st.sampled_from(KINDS),
    st.sampled_from(["equal", "steps", "tokens"]),
    st.sampled_from(["plain", "bf16", "int8"]),
)
def test_every_sync_is_the_weighted_mean(tokens, kind, weight, codec):
    replicas = len(tokens)
    found = run(
        lambda exchange: train(exchange, tokens, weight, codec=codec), exchanges(kind, replicas)
    )
    wanted, shares = by_the_formulas(tokens, weight, [2 * EVERY] * replicas, codec)
    for values, reports in found:
        assert torch.allclose(values, wanted, rtol=1e-12, atol=1e-12)
        assert torch.equal(values, found[0][0])
        for report, each in zip(reports, shares, strict=True):
            assert near(report.weights, [] if len(set(each)) == 1 else each)
            assert json.loads(report.to_json())["weights"] == list(report.weights)


@pytest.mark.parametrize("kind", ["threads", "store"])
@pytest.mark.parametrize("weight", ["steps", "tokens"])
def test_a_partial_period_weighs_by_its_own_steps(kind, weight):
    """One replica takes fewer steps before it leaves: its last contribution covers fewer."""
    steps, tokens = [5, 4], [[3, 1, 4, 1, 5, 9], [2, 7, 1, 8, 2, 8]]
    found = run(
        lambda exchange: train(exchange, tokens, weight, steps[exchange.rank]), exchanges(kind, 2)
    )
    wanted, shares = by_the_formulas(tokens, weight, steps)
    for values, reports in found:
        assert torch.allclose(values, wanted, rtol=1e-12, atol=1e-12)
        assert near(reports[-1].weights, shares[-1])


@pytest.mark.parametrize("kind", KINDS)
def test_equal_weights_give_the_bytes_of_the_plain_mean(kind):
    """Equal weights change nothing: the sum is divided by the number of replicas."""
    tokens = [[3] * 6] * 3
    plain, weighed = (
        run(lambda exchange, weight=weight: train(exchange, tokens, weight)[0], exchanges(kind, 3))
        for weight in ("equal", "tokens")
    )
    assert all(torch.equal(values, plain[0]) for values in (*plain, *weighed))


def test_buffers_have_no_weights():
    def replica(exchange):
        model = torch.nn.BatchNorm1d(4)
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        with DiLoCo(model, inner, exchange, sync_every=1, weight="tokens") as outer:
            model.running_mean += 4.0 * exchange.rank
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            outer.count_tokens(1 + exchange.rank)
            inner.step()
        return model.running_mean

    for mean in run(replica, in_process(2)):
        assert torch.equal(mean, torch.full((4,), 2.0))


@pytest.mark.parametrize("delay", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_and_steps_belong_to_what_is_sent(kind, delay):
    """With a delay, the tokens of the steps that are replaced by the result count nowhere."""
    tokens = [[1, 2, 4, 8, 16, 32], [5, 3, 5, 3, 5, 3]]

    def replica(exchange):
        return train(exchange, tokens, "tokens", delay=delay, flush="none")[1]

    sent = EVERY - delay
    for reports in run(replica, exchanges(kind, 2)):
        for report, first in zip(reports, (0, EVERY), strict=True):
            weights = [sum(each[first : first + sent]) ** 2 for each in tokens]
            assert near(report.weights, [Fraction(w, sum(weights)) for w in weights])


@pytest.mark.parametrize("topology", ["sharded", "gather"])
@pytest.mark.parametrize("weight", ["steps", "tokens"])
def test_a_carried_contribution_weighs_as_much_as_it_covers(weight, topology):
    training = SimulatedTraining(12, (40,), weight=weight, pauses={(1, 3): 6.0})
    elastic = Elastic(1, grace=2.0, topology=topology)
    outcome = simulate(training, Schedule(2, latency=0.01), elastic)
    assert violations(outcome, training) == []
    reports = training.reports[1, 1]
    assert "carried" in [report.contribution for report in reports]
    unequal = [r for r in reports if r.contribution == "counted" and r.weights]
    assert unequal, "what was carried covers more steps than what others send"


def stored(folder, resume):
    store = open_store(str(folder))
    return [StoreExchange(store, rank, 2, resume=resume) for rank in range(2)]


def test_a_run_that_is_resumed_goes_on_with_the_tokens_of_open_steps(tmp_path):
    """With two fragments, one of them holds steps that no sync counts when the run stops."""
    tokens = [[1, 2, 3, 4, 5, 6], [9, 8, 7, 6, 5, 4]]

    def replica(exchange, steps, reports):
        model = torch.nn.ParameterList([torch.zeros(5), torch.zeros(5)])
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        with DiLoCo(
            model,
            inner,
            exchange,
            sync_every=4,
            fragments=2,
            weight="tokens",
            flush="none",
            on_sync=reports.append,
        ) as outer:
            for step in range(outer.inner_steps, steps):
                for parameter in model:
                    parameter.grad = torch.ones(5)
                outer.count_tokens(tokens[exchange.rank][step])
                inner.step()

    def train_to(*ends):
        reports = []
        for steps in ends:
            resume = steps != ends[0]
            run(
                lambda exchange, steps=steps: replica(
                    exchange, steps, reports if exchange.rank == 0 else []
                ),
                stored(tmp_path / str(len(ends)), resume=resume),
            )
        return [report.weights for report in reports]

    assert train_to(3, 6) == train_to(6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sync_without_counted_tokens_is_refused(kind):
    def replica(exchange):
        train(exchange, [[0] * 6] * 2, "tokens")

    results = run_replicas(replica, exchanges(kind, 2))
    assert any(
        isinstance(error, ConfigurationError) and "outer.count_tokens(n)" in str(error)
        for error in results
    )
    assert all(isinstance(error, Exception) for error in results)


def lone(weight="tokens"):
    model = torch.nn.Linear(2, 2)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    return DiLoCo(model, inner, in_process(1)[0], sync_every=2, weight=weight)


@pytest.mark.parametrize("n", [-1, 1.5, "many", None, True, float("nan")])
def test_tokens_are_whole_numbers(n):
    with (
        lone() as outer,
        pytest.raises(ConfigurationError, match=r"n in count_tokens\(n\) must be"),
    ):
        outer.count_tokens(n)


def test_there_is_a_largest_number_of_tokens():
    with lone() as outer:
        outer.count_tokens(10**18 - 1)
        with pytest.raises(ConfigurationError, match="larger unit"):
            outer.count_tokens(1)


@pytest.mark.parametrize("weight", ["equal", "steps"])
def test_tokens_are_not_counted_where_nothing_asks_for_them(weight):
    with lone(weight) as outer, pytest.raises(ConfigurationError, match="weight='tokens'"):
        outer.count_tokens(5)


def test_tokens_are_counted_inside_the_block():
    with pytest.raises(SyncError, match="before the block was entered"):
        lone().count_tokens(5)


@pytest.mark.parametrize("weight", ["token", 1, True])
def test_unknown_weights(weight):
    with pytest.raises(
        ConfigurationError, match="weight must be one of 'equal', 'steps', 'tokens'"
    ):
        lone(weight)


def test_a_manager_has_no_weights():
    model = torch.nn.Linear(2, 2)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    manager = ManagerExchange(MockManager(in_process(1)[0]))
    with pytest.raises(ConfigurationError, match="weight='steps' cannot be used with Manager"):
        DiLoCo(model, inner, manager, sync_every=2, weight="steps")


@pytest.mark.parametrize("kind", ["threads", "store"])
def test_replicas_with_different_weights_are_refused(kind):
    def replica(exchange):
        train(exchange, [[1] * 6] * 2, ["steps", "tokens"][exchange.rank])

    results = run_replicas(replica, exchanges(kind, 2))
    assert any(isinstance(e, MismatchError) and "weight" in str(e) for e in results)

"""Test how much each replica's contribution counts, over every exchange, by the formulas."""

import json
from fractions import Fraction

import pytest
import torch
from codecs_lab import decoded as as_sent
from hypothesis import given
from hypothesis import strategies as st
from loop_lab import AVERAGING, KINDS, exchanges, loop
from simulated import Schedule, SimulatedTraining, simulate, violations
from training_lab import run

from diloco_core import ConfigurationError, DiLoCo, Elastic, SyncError
from diloco_core.testing import run_replicas

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
    options = {"sync_every": EVERY, **AVERAGING, "on_sync": reports.append, **options}
    with DiLoCo(model, inner, exchange, weight=weight, **options) as outer:
        for step in range(outer.inner_steps, steps):
            model[0].grad = gradient(exchange.rank, step)
            if weight == "tokens":
                outer.count_tokens(tokens[exchange.rank][step])
            inner.step()
    return model[0].detach().clone(), reports


def by_the_formulas(tokens, weight, steps, codec="plain"):
    """The parameters at the end, and the shares of every sync."""
    values, shares = torch.zeros(SIZE, dtype=torch.float64), []
    for first in range(0, max(steps), EVERY):
        learned, weights = [], []
        for rank in range(len(tokens)):
            taken = range(first, min(first + EVERY, steps[rank]))
            delta = sum((gradient(rank, step) for step in taken), torch.zeros_like(values))
            learned.append(as_sent(codec, delta))
            weights.append(weigh(weight, len(taken), sum(tokens[rank][step] for step in taken)))
        shares.append([weight / sum(weights) for weight in weights])
        values = values - sum(float(a) * d for a, d in zip(shares[-1], learned, strict=True))
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
    st.sampled_from([2 * EVERY, 5]),
)
def test_every_sync_is_the_weighted_mean(tokens, kind, weight, codec, last):
    """A partial period weighs by its own steps: the first replica may take fewer than others."""
    steps = [2 * EVERY] * len(tokens)
    if kind in {"threads", "store"}:
        steps[0] = last
    results = run(
        lambda each: train(each, tokens, weight, steps[each.rank], codec=codec),
        exchanges(kind, len(tokens)),
    )
    wanted, shares = by_the_formulas(tokens, weight, steps, codec)
    for values, reports in results:
        assert torch.allclose(values, wanted, rtol=1e-12, atol=1e-12)
        assert torch.equal(values, results[0][0])
        for report, each in zip(reports, shares, strict=True):
            assert near(report.weights, [] if len(set(each)) == 1 else each)
            assert json.loads(report.to_json())["weights"] == list(report.weights)


@pytest.mark.sampled
@pytest.mark.parametrize("kind", KINDS)
def test_equal_weights_give_the_bytes_of_the_plain_mean(kind):
    tokens = [[3] * 6] * 3
    plain, weighed = (
        run(lambda each, weight=weight: train(each, tokens, weight)[0], exchanges(kind, 3))
        for weight in ("equal", "tokens")
    )
    assert all(torch.equal(values, plain[0]) for values in (*plain, *weighed))


@pytest.mark.sampled
@pytest.mark.parametrize("delay", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_and_steps_belong_to_what_is_sent(kind, delay):
    """With a delay, the tokens of the steps that are replaced by the result count nowhere."""
    tokens = [[1, 2, 4, 8, 16, 32], [5, 3, 5, 3, 5, 3]]
    options = {"delay": delay, "flush": "none"}
    sent = EVERY - delay
    for _, reports in run(
        lambda each: train(each, tokens, "tokens", **options), exchanges(kind, 2)
    ):
        for report, first in zip(reports, (0, EVERY), strict=True):
            weights = [sum(token[first : first + sent]) ** 2 for token in tokens]
            assert near(report.weights, [Fraction(w, sum(weights)) for w in weights])


@pytest.mark.sampled
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


@pytest.mark.parametrize("kind", KINDS)
def test_a_sync_without_counted_tokens_is_refused(kind):
    results = run_replicas(lambda each: train(each, [[0] * 6] * 2, "tokens"), exchanges(kind, 2))
    refused = [error for error in results if isinstance(error, ConfigurationError)]
    assert refused
    assert "outer.count_tokens(n)" in str(refused[0])
    assert all(isinstance(error, Exception) for error in results)


def test_tokens_are_whole_numbers_up_to_a_limit_counted_inside_the_block():
    with pytest.raises(SyncError, match="before the block was entered"):
        loop(weight="tokens")[2].count_tokens(5)
    with loop(weight="tokens")[2] as outer:
        for n in (-1, 1.5, "many", None, True, float("nan")):
            with pytest.raises(ConfigurationError, match=r"n in count_tokens\(n\) must be"):
                outer.count_tokens(n)
        outer.count_tokens(10**18 - 1)
        with pytest.raises(ConfigurationError, match="larger unit"):
            outer.count_tokens(1)
    for weight in ("equal", "steps"):
        with (
            loop(weight=weight)[2] as outer,
            pytest.raises(ConfigurationError, match="weight='tokens'"),
        ):
            outer.count_tokens(5)

"""The sparse codec: which values are sent, in which bytes, and what their mean is."""

import math
import statistics

import pytest
import torch
from codecs_lab import CODECS, SPARSE, decoded, random
from hypothesis import given
from hypothesis import strategies as st
from training_lab import run

from diloco_core import ConfigurationError, DiLoCo, in_process, plan_exchange

BLOCK = 4096


def by_the_rules(block, k):
    """SparseLoCo's rules for the values of one block, one at a time."""
    chosen = sorted(range(len(block)), key=lambda index: -abs(block[index]))[:k]
    values = [block[index] for index in chosen]
    shift = math.fsum(values) / k
    scale = 6 * statistics.stdev(values) / 4 if k > 1 else 0.0
    bins = {}
    for index, value in zip(chosen, values, strict=True):
        code = round((value - shift) / scale + 2) if scale else 2
        bins.setdefault(min(max(code, 0), 3), []).append((index, value))
    wanted = [0.0] * len(block)
    for members in bins.values():
        for index, _ in members:
            wanted[index] = math.fsum(value for _, value in members) / len(members)
    return wanted


@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.parametrize("numel", [1, 2, 31, 32, 33, 95, 96, 1000, BLOCK, BLOCK + 700, 3 * BLOCK])
def test_it_decodes_to_what_the_rules_say(name, numel):
    values = random(numel, numel)
    k = int(name.removeprefix("topk"))
    wanted = []
    for start in range(0, numel, BLOCK):
        block = values[start : start + BLOCK].tolist()
        wanted += by_the_rules(block, max(1, math.floor(len(block) * k / BLOCK + 0.5)))
    assert torch.allclose(decoded(name, values), torch.tensor(wanted), rtol=1e-6, atol=0)


@st.composite
def blocks(draw):
    """Ties; steps; one cluster; what is not finite; numbers that differ in their lowest bits."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    values, kind = torch.randn(BLOCK, generator=generator), draw(st.integers(0, 7))
    if kind == 1:
        values = values.round()
    elif kind == 2:
        values = torch.where(torch.rand(BLOCK, generator=generator) < 0.03, values, -0.0)
    elif kind == 3:
        values = torch.arange(BLOCK) - 100.0
    elif kind == 4:
        values[::16] *= 1e6  # all in few groups
    elif kind == 5:
        values = torch.full((BLOCK,), 1e-40)
    elif kind == 6:
        bad = draw(st.sampled_from([torch.inf, -torch.inf, torch.nan]))
        values[draw(st.integers(0, BLOCK - 1))] = bad
    elif kind == 7:
        order = torch.randperm(BLOCK, generator=generator, dtype=torch.int32)
        values = (order * draw(st.sampled_from([1, 64])) + 0x3F800000).view(torch.float32)
    return values


def assert_largest(name, values, k):
    """The positions in the bytes are those that torch.topk finds."""
    before = values.clone()
    codec, found = CODECS[name], []
    size = codec.size(torch.float32, values.shape[1])
    data = codec.encode(values.view(-1))
    for row in range(len(values)):
        packed = data[size * row + 16 :][: -(-3 * k // 2)].tolist()
        number = int.from_bytes(bytes(packed), "little")
        found.append([number >> 12 * each & 0xFFF for each in range(k)])
    assert found == values.abs().topk(k, 1, sorted=False).indices.sort(1).values.tolist()
    assert torch.equal(values.view(torch.int32), before.view(torch.int32))


@pytest.mark.parametrize("name", SPARSE)
@given(rows=st.lists(blocks(), min_size=1, max_size=5))
def test_the_largest_are_sent_whatever_the_values_are(name, rows):
    assert_largest(name, torch.stack(rows), int(name.removeprefix("topk")))


def test_the_bytes():
    """A table of four float32; positions of 12 bits; bins of two bits."""
    values = torch.zeros(192)
    values[[3, 100, 191]] = torch.tensor([1.0, -3.0, 2.0])
    data = CODECS["topk64"].encode(values)
    table = data[:16].clone().view(torch.float32).tolist()
    assert table == [0.0, -3.0, 1.0, 2.0]  # mean 0, deviation 2.65, so the bins are 3.97 wide
    assert data[16:21].tolist() == [3, 100 << 4 & 255, 100 >> 4, 191, 0]
    assert data[21:].tolist() == [2 | 1 << 2 | 3 << 4]


@pytest.mark.parametrize("name", SPARSE)
def test_bytes_that_are_damaged_decode_to_something(name):
    """They are read before they are checked, and most positions lie outside a short block."""
    codec = CODECS[name]
    for numel in (5, 100, BLOCK + 33):
        data = torch.full((codec.size(torch.float32, numel),), 255, dtype=torch.uint8)
        codec.decode(data, torch.empty(numel))


@given(
    st.lists(st.sampled_from([0.0, 1.0, -1.0, 0.5, 3e38, -3e38, 1e-40]), min_size=1, max_size=300)
)
def test_equal_magnitudes_are_chosen_alike_whatever_comes_before(numbers):
    """Replicas cut chunks differently, so ties must not depend on what else is encoded."""
    codec, values = CODECS["topk64"], torch.tensor(numbers)
    block = values.repeat(-(-BLOCK // len(values)))[:BLOCK]
    alone = bytes(codec.encode(block).tolist())
    beside = bytes(codec.encode(torch.cat((random(2 * BLOCK), block, random(BLOCK)))).tolist())
    assert beside[2 * len(alone) : 3 * len(alone)] == alone


def one_step(exchange, gradients, tokens=0, **options):
    """A parameter of two blocks after one sync, which began at zero."""
    model = torch.nn.Linear(2 * BLOCK, 1, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    options |= {"codec": "topk64", "outer_lr": 1.0, "outer_momentum": 0.0}
    with DiLoCo(model, inner, exchange, sync_every=1, **options) as outer:
        for gradient in gradients[exchange.rank]:
            if tokens:
                outer.count_tokens(tokens)
            model.weight.grad = gradient.clone().view(1, -1)
            inner.step()
    return model.weight.detach().view(-1).clone()


def test_the_mean_is_weighted_among_those_who_sent_a_value():
    gradients = [[random(2 * BLOCK, rank)] for rank in range(2)]
    weighted = {"weight": "tokens"}
    ends = run(lambda e: one_step(e, gradients, 1 + e.rank, **weighted), in_process(2))
    assert torch.equal(*ends)
    sent = [decoded("topk64", steps[0]) for steps in gradients]
    shares = [0.2, 0.8]  # 1 to 4, the squares of the tokens
    total = sum(share * values for share, values in zip(shares, sent, strict=True))
    senders = sum(share * (values != 0) for share, values in zip(shares, sent, strict=True))
    assert torch.allclose(-ends[0], total / senders.clamp(min=0.1), rtol=1e-5, atol=0)


def test_everything_is_sent_in_time():
    """Error feedback is on by itself; with a decay of 1 nothing is lost."""
    gradients = [[random(2 * BLOCK)] * 150]
    (end,) = run(lambda e: one_step(e, gradients, error_feedback=1.0), in_process(1))
    (fading,) = run(lambda e: one_step(e, gradients), in_process(1))
    wanted = -150 * gradients[0][0]
    assert ((end - wanted).norm() / wanted.norm()) < 0.3
    assert (fading != 0).float().mean() > 0.3
    assert (fading - wanted).norm() > (end - wanted).norm()


@pytest.mark.parametrize("name", SPARSE)
def test_what_it_does_not_go_with_is_refused(name):
    for text, options in (
        ("codec='{}' needs error feedback", {"codec": name, "error_feedback": False}),
        ("'trimmed' cannot be used with codec='{}'", {"codec": name, "aggregate": "trimmed"}),
        ("state_codec='{}' sends only a few", {"state_codec": name}),
    ):
        model = torch.nn.Linear(4, 1)
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        with pytest.raises(ConfigurationError, match=text.format(name)):
            DiLoCo(model, inner, in_process(3)[0], sync_every=1, **options)


@pytest.mark.parametrize("replicas", [2, 4])
def test_gather_suits_it_and_is_chosen(replicas):
    """In the sharded topology, the new values would travel in full at every sync."""
    plans = {
        topology: plan_exchange(1e9, replicas, 1.25e8, codec="topk64", topology=topology)
        for topology in ("sharded", "gather")
    }
    assert plans["gather"].seconds < 0.6 * plans["sharded"].seconds
    assert plan_exchange(1e9, replicas, 1.25e9, codec="topk64").topology == "gather"
    for options in ({}, {"codec": "topk64", "state_codec": "int8"}):
        assert plan_exchange(1e9, replicas, 1.25e9, **options).topology == "sharded"

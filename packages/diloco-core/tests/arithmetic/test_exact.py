"""Test what all replicas compute alike: sums, encoded updates, and the learning rate of a sync."""

import math
import struct

import pytest
import torch
from codecs_lab import CODECS, DENSE, decoded, random
from hypothesis import example, given, settings
from hypothesis import strategies as st

from diloco_core._arithmetic._coded import encode_update
from diloco_core._arithmetic._layout import Group, Layout, Rule
from diloco_core._arithmetic._rate import NO_RATE, Proposal, Rate, chosen, digits, values_of
from diloco_core._arithmetic._reduction import reduce_shards
from diloco_core._arithmetic._sharded import Scratch
from diloco_core._terms._terms import DEFAULT

groups = st.lists(
    st.tuples(
        st.sampled_from([torch.float64, torch.float32, torch.int64, torch.uint8]),
        st.integers(0, 70),
        st.sampled_from(Rule),
    ),
    min_size=1,
    max_size=4,
)


class Job:
    """Keeps what it is given."""

    terms = DEFAULT

    def __init__(self, layout):
        self.layout = layout
        self.values = [torch.zeros(group.numel, dtype=group.dtype) for group in layout.groups]

    def must_be_finite(self, piece):
        return self.layout.groups[piece.group].rule is Rule.OUTER

    def update(self, piece, reduced):
        self.values[piece.group][piece.start : piece.stop] = reduced
        return reduced

    def check_update(self, piece, values, sync):
        pass

    def adopt(self, piece, values):
        pass


def layouts(draw):
    made = [
        Group(dtype, numel, rule if dtype.is_floating_point else Rule.FIRST)
        for dtype, numel, rule in draw(groups)
    ]
    made.sort(key=lambda group: -group.dtype.itemsize)
    return Layout(tuple(made), draw(st.integers(1, 5)))


@settings(deadline=None)
@given(
    data=st.data(), chunk=st.integers(1, 200), block=st.integers(0, 500), members=st.integers(1, 4)
)
def test_blocks_change_nothing(data, chunk, block, members):
    layout = layouts(data.draw)
    torch.manual_seed(1)
    given_values = [
        [torch.randn(group.numel).mul(100).to(group.dtype) for group in layout.groups]
        for _ in range(members)
    ]
    if members > 1 and data.draw(st.booleans()):  # buffers that all hold alike stay as they are
        given_values = [given_values[0]] * members

    def source(values):
        return lambda piece, out: out.copy_(values[piece.group][piece.start : piece.stop])

    results = []
    for shards, size in [
        ([[shard] for shard in range(layout.shards)], 0),
        ([list(range(layout.shards))], block),
    ]:
        job, scratch = Job(layout), Scratch(chunk)
        for batch in shards:
            sources, options = list(map(source, given_values)), {"block_bytes": size}
            reduce_shards(job, batch, sources, chunk, scratch, sync=1, **options)
        results.append(job.values)
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
    for group, values in zip(layout.groups, results[0], strict=True):
        if group.rule is Rule.FIRST:
            index = layout.groups.index(group)
            assert torch.equal(values, given_values[0][index]) or layout.groups.count(group) > 1


def read(codec, data, like):
    out = torch.empty_like(like)
    codec.decode(data, out)
    return out


@pytest.mark.sampled
@pytest.mark.parametrize("name", [name for name in CODECS if name != "plain"])
@given(st.integers(0, 10**6), st.integers(1, 700), st.integers(-8, 3))
def test_everybody_comes_to_the_owners_values(name, seed, numel, exponent):
    """The stored bytes give all the owner's values and residual, bit by bit, over several syncs."""
    codec = CODECS[name]
    owner = random(numel, seed)
    other, residual, others_residual = owner.clone(), None, torch.zeros(numel)
    for sync in range(4):
        old, step = owner.clone(), random(numel, seed + sync + 1) * 10.0**exponent
        owner += step
        wanted = owner - old + others_residual
        update = encode_update(codec, old, owner, residual)
        sent = read(codec, update.data, old)
        other += sent
        assert torch.equal(owner, other)
        others_residual = read(codec, update.left, old)
        residual = update.residual
        assert torch.equal(residual, others_residual)
        assert torch.equal(others_residual, decoded(codec, wanted - sent))


@pytest.mark.sampled
@pytest.mark.parametrize("name", [name for name in DENSE if name != "fp32"])
def test_small_values_arrive_in_the_end(name):
    """Without the residual, values far below the largest of their block would never move."""
    codec = CODECS[name]
    step = torch.full((256,), 1e-3)
    step[0] = 1.0
    values, residual = torch.zeros(256), None
    for _ in range(2000):
        old = values.clone()
        values += step
        residual = encode_update(codec, old, values, residual).residual
    off = (values[1:].double().mean() / 2.0 - 1.0).abs().item()
    assert off < (0.35 if name == "e2m1" else 0.05)


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_not_encoded(wrong):
    old, new = torch.zeros(300), torch.ones(300)
    new[7] = wrong
    assert encode_update(CODECS["int8"], old, new, None) is None
    assert not new.isfinite().all()


def test_only_differences_that_overflow_are_not_encoded():
    """The quick check adds all values up; only the values themselves must be finite."""
    old, new = torch.full((32,), -3e38), torch.full((32,), 3e38)
    assert encode_update(CODECS["int8"], old, new, None) is None
    assert new.isinf().all()
    old, new = torch.zeros(32), torch.full((32,), 3e38)
    assert encode_update(CODECS["int8"], old, new, None) is not None


VALUES = st.floats(5e-324, 1.7e308)
RATES = st.builds(
    Rate,
    st.lists(VALUES, min_size=1, max_size=3).map(tuple),
    st.integers(0, 999_999_999),
    st.integers(0, 99_999),
)


@given(RATES)
@example(Rate((0.1,)))
@example(Rate((5e-324, 1.0), 1, 2))
def test_the_text_of_a_rate_is_the_rate_to_the_last_bit(rate):
    assert Rate.parse(rate.text) == rate


@given(st.floats())
def test_only_positive_numbers_are_rates(value):
    allowed = 0 < value < math.inf
    assert values_of(struct.pack(">d", value).hex()) == ((value,) if allowed else None)
    assert (Rate.parse(f"0-0-{digits([value])}") is not None) == allowed


@given(st.text("0123456789abcdef-. ", max_size=40))
@example("0-0-")
@example("1-2-3fe00000000000000")
@example("01-2-3fe0000000000000")
@example("0--3fe0000000000000")
@example("")
def test_what_can_be_read_is_written_in_only_one_way(text):
    rate = Rate.parse(text)
    assert (rate == NO_RATE) == (text == "")
    assert rate is None or rate.text == text


@given(st.lists(st.tuples(st.booleans(), VALUES), min_size=1, max_size=5), RATES)
def test_the_greatest_rank_of_those_that_ask_is_heard(replicas, last):
    """If nobody asks, the rate stays as it is."""
    proposals = [Proposal(last, (value,) if asks else ()) for asks, value in replicas]
    rate = chosen(proposal.rate(rank) for rank, proposal in enumerate(proposals))
    asking = [rank for rank, (asks, _) in enumerate(replicas) if asks]
    if not asking:
        assert rate == last
        return
    assert rate == Rate((replicas[asking[-1]][1],), last.number + 1, asking[-1])


@given(st.lists(VALUES, min_size=1, max_size=5))
def test_of_functions_that_differ_that_of_rank_0_counts(values):
    proposals = [Proposal(Rate((value,))) for value in values]
    rate = chosen(proposal.rate(rank) for rank, proposal in enumerate(proposals))
    assert rate == Rate((values[0],))

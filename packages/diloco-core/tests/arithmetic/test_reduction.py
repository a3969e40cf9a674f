"""Adding up: block by block or chunk by chunk, the numbers are the same to the last bit."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_core._arithmetic._layout import Group, Layout, Piece, Rule
from diloco_core._arithmetic._reduction import blocks, reduce_shards
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
    made = []
    for dtype, numel, rule in draw(groups):
        made.append(Group(dtype, numel, rule if dtype.is_floating_point else Rule.FIRST))
    return Layout(
        tuple(sorted(made, key=lambda group: -group.dtype.itemsize)), draw(st.integers(1, 5))
    )


@settings(deadline=None)
@given(
    data=st.data(), chunk=st.integers(1, 200), block=st.integers(0, 500), members=st.integers(1, 4)
)
def test_blocks_change_nothing(data, chunk, block, members):
    layout = layouts(data.draw)
    torch.manual_seed(1)
    given_values = [
        [
            torch.randn(group.numel, dtype=group.dtype)
            if group.dtype.is_floating_point
            else torch.randint(0, 100, (group.numel,)).to(group.dtype)
            for group in layout.groups
        ]
        for _ in range(members)
    ]
    if members > 1 and data.draw(st.booleans()):
        given_values = [
            given_values[0]
        ] * members  # buffers that all hold alike come out as they went in

    def source(values):
        return lambda piece, out: out.copy_(values[piece.group][piece.start : piece.stop])

    found = []
    for shards, size in [
        ([[shard] for shard in range(layout.shards)], 0),
        ([list(range(layout.shards))], block),
    ]:
        job, scratch = Job(layout), Scratch(chunk)
        for batch in shards:
            reduce_shards(
                job,
                batch,
                [source(values) for values in given_values],
                chunk,
                scratch,
                sync=1,
                block_bytes=size,
                everything=True,
            )
        found.append(job.values)
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    for group, values in zip(layout.groups, found[0], strict=True):
        if group.rule is Rule.FIRST:
            index = layout.groups.index(group)
            assert torch.equal(values, given_values[0][index]) or layout.groups.count(group) > 1


@settings(deadline=None)
@given(data=st.data(), chunk=st.integers(1, 200), block=st.integers(0, 500))
def test_blocks_hold_every_chunk_once_and_are_no_larger_than_asked_for(data, chunk, block):
    layout = layouts(data.draw)
    shards = data.draw(st.lists(st.integers(0, layout.shards - 1), unique=True))
    made = list(blocks(layout, shards, chunk, block))
    assert [each for one in made for each in one] == [
        (shard, piece) for shard in shards for piece in layout.chunks(shard, chunk)
    ]
    for one in made:
        assert len(one) == 1 or sum(layout.piece_bytes(piece) for _, piece in one) <= block
    assert all(isinstance(piece, Piece) for one in made for _, piece in one)

"""The residual of error feedback: what counted and what remains is what was learned."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from diloco_core._arithmetic._layout import Group, Layout, Rule
from diloco_core._codecs._named import CODECS
from diloco_core._outer._residual import Residual

CODEC = CODECS["e2m1"]
SIZE = 70
LAYOUT = Layout((Group(torch.float32, SIZE, Rule.OUTER), Group(torch.float32, 5, Rule.MEAN)), 2, 32)


def make(decay=1.0, codec=CODEC, layout=LAYOUT):
    return Residual(layout, codec, decay, 3, lambda piece, index: f"element {piece.start + index}")


def learned(number):
    generator = torch.Generator().manual_seed(number)
    return [torch.randn(SIZE, generator=generator), torch.full((5,), 0.3)]


def decoded(values):
    """Return what the others read: shard by shard, since blocks begin anew in each."""
    out = torch.empty_like(values)
    for shard in range(LAYOUT.shards):
        for piece in LAYOUT.shard(shard):
            if piece.group == 0:
                part = slice(piece.start, piece.stop)
                CODEC.decode(CODEC.encode(values[part]), out[part])
    return out


def held(residual):
    return residual.values[0] if residual.values else torch.zeros(SIZE)


FATES = ["counted", "carried", "dropped", "none", "foreign", "open", "gone back"]


@given(st.lists(st.tuples(st.sampled_from(FATES), st.booleans()), max_size=12))
def test_what_was_counted_and_what_remains_is_what_was_learned(events):
    """Also over restarts, which go on with what was saved last, or with zero."""
    residual, position, step = make(), 0, 0
    # What was learned, of contributions that counted; what the run has added up; what is lost.
    offered_to_run, added_up, lost = torch.zeros(3, SIZE, dtype=torch.float64)
    saved, sent = ([], 0), None
    for fate, restarts in events:
        step += 2
        delta, values = learned(step), learned(step)
        residual.offer(values, step)
        if sent is None:  # a contribution that was left open is the one that is in the store
            sent = delta[0].double(), decoded(values[0]), step
        before = held(residual).clone()
        if fate == "counted":
            position = sent[2]
            offered_to_run += sent[0]
            added_up += sent[1]
        elif fate == "foreign":
            position += 1
        elif fate == "gone back":
            position = max(0, position - 1)
        told = {"foreign": "dropped", "gone back": "dropped"}.get(fate, fate)
        if residual.settle(told, position):
            lost += before
        if fate != "open":
            sent = None
        if fate in {"carried", "dropped", "none", "open"}:
            assert torch.equal(held(residual), before)
        if fate == "counted":
            saved = [values.clone() for values in residual.values], residual.tag
        if restarts:
            before, residual, sent = held(residual), make(), None
            residual.load(*saved)
            if residual.move(position):
                lost += before
            elif not torch.equal(held(residual), before):
                assert not before.any()  # it had lost it already, and says so no more than once
                lost -= held(residual)
        assert residual.tag == position
        total = added_up + held(residual) + lost
        assert torch.allclose(total, offered_to_run, rtol=0, atol=1e-5)


def test_an_outcome_that_is_not_its_own_leaves_nothing():
    """Another contribution with the same end, or another one that was counted meanwhile."""
    for text, before, after in (("dropped", 2, 2), ("counted", 4, 3)):
        residual = make()
        residual.offer(learned(0), before)
        assert residual.settle(text, after)
        assert not residual.values
    residual.load([torch.ones(SIZE), torch.empty(0)], 2)
    residual.offer(learned(1), 4)
    residual.settle("none", 2)
    assert not residual.settle("counted", None)  # nothing is offered any more
    assert torch.equal(held(residual), torch.ones(SIZE))

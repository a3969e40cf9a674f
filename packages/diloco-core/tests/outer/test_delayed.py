"""A fragment that is sent at one step and adopted at a later one."""

import pytest
import torch
from torch import nn

from diloco_core._arithmetic._layout import Piece
from diloco_core._model._partition import Buffers, split
from diloco_core._outer._delayed import DelayedFragment
from diloco_core._outer._optimizer import OuterOptimizer, outer_factory
from diloco_core._terms._schedule import Schedule
from diloco_core._terms._terms import OuterGroup, Terms


def fragment_of(model, alpha=0.5):
    (tensors,) = split(model, 1, Buffers.MEAN)
    outer = OuterOptimizer([OuterGroup(outer_factory(None, None, None, None))])
    terms = Terms(schedule=Schedule(1, 1, alpha=alpha))
    fragment = DelayedFragment("0", tensors, outer, 1, terms)
    fragment.take_snapshot()
    return fragment


def model_of(dtype=torch.float32):
    model = nn.Sequential(nn.Linear(3, 2, bias=False), nn.BatchNorm1d(2, affine=False)).to(dtype)
    with torch.no_grad():
        model[0].weight.copy_(torch.arange(6.0).view(2, 3))
    return model


def groups(fragment):
    return [Piece(index, 0, group.numel) for index, group in enumerate(fragment.layout.groups)]


def weights_group(fragment):
    return next(piece for piece in groups(fragment) if fragment.must_be_finite(piece))


def contribution(fragment, piece):
    return fragment.contributed(piece, fragment.copy[piece.group].new_empty(piece.numel))


def test_while_it_is_detached_nobody_touches_the_model():
    model = model_of()
    fragment = fragment_of(model)
    fragment.detach()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fragment.begin()
    for piece in groups(fragment):
        fragment.adopt(piece, fragment.copy[piece.group] + 1)
    fragment.progress()
    fragment.reapply([torch.ones(piece.numel) for piece in groups(fragment)])
    fragment.finish()
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    fragment.attach()
    fragment.begin()
    for piece in groups(fragment):
        fragment.adopt(piece, fragment.copy[piece.group] + 1)
    fragment.finish()
    assert all(torch.equal(before[name] + 1, tensor) for name, tensor in model.state_dict().items())


def test_what_it_sends_is_what_the_model_held_when_it_departed():
    model = model_of()
    fragment = fragment_of(model)
    with torch.no_grad():
        model[0].weight.sub_(2)
        model[1].running_mean.add_(3)
    changed = set(range(len(fragment.layout.groups))) - set(_unchanged(fragment))
    fragment.depart()
    sent = [contribution(fragment, piece).clone() for piece in groups(fragment)]
    with torch.no_grad():
        model[0].weight.fill_(torch.nan)
        for _, buffer in model.named_buffers():
            buffer.add_(9)
    assert all(
        torch.equal(values, contribution(fragment, piece))
        for values, piece in zip(sent, groups(fragment), strict=True)
    )
    assert set(range(len(fragment.layout.groups))) - set(fragment.unchanged()) == changed
    assert not fragment.is_surely_finite(weights_group(fragment))
    assert torch.equal(contribution(fragment, weights_group(fragment)), torch.full((6,), 2.0))


def _unchanged(fragment):
    fragment.begin()
    unchanged = fragment.unchanged()
    fragment.finish()
    return unchanged


@pytest.mark.parametrize(
    ("fate", "alpha", "wanted"),
    [
        ("counted", 0.0, 10.0),
        ("counted", 0.25, 10.0 + 0.25 * (3.0 - 10.0)),
        ("counted", 1.0, 3.0),
        ("carried", 0.0, 10.0 + (3.0 - 1.0)),
        ("carried", 0.25, 10.0 + 0.25 * (1.0 - 10.0) + (3.0 - 1.0)),
        ("carried", 1.0, 3.0),
        ("dropped", 0.25, 10.0),
        ("none", 0.25, 10.0),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_the_model_holds_afterwards(fate, alpha, wanted, dtype):
    """The global copy goes from 1 to 10 while the model goes to 3."""
    model = model_of(dtype)
    with torch.no_grad():
        model[0].weight.fill_(1.0)
    fragment = fragment_of(model, alpha)
    fragment.depart()
    with torch.no_grad():
        model[0].weight.fill_(3.0)
        model[1].running_mean.fill_(3.0)
    model[0].weight.grad = torch.ones_like(model[0].weight)
    if fate == "carried":
        assert fragment.progress() == []
    for copy in fragment.copy:
        copy.fill_(10)
    fragment.arrive(fate)
    assert torch.equal(model[0].weight, torch.full_like(model[0].weight, wanted))
    assert model[0].weight.grad is None, "it belongs to the old values"
    assert (model[1].running_mean == 10).all(), "buffers take what was synced"


def test_with_alpha_1_what_was_carried_stays_to_the_bit():
    model = model_of()
    fragment = fragment_of(model, 1.0)
    fragment.depart()
    own = torch.tensor([1e-8, 3.3, -7.7, 1e8, 0.1, 1e-30]).view(2, 3)
    with torch.no_grad():
        model[0].weight.copy_(own)
    fragment.progress()
    fragment.copy[weights_group(fragment).group].fill_(123.4)
    fragment.arrive("carried")
    assert torch.equal(model[0].weight, own)


def test_a_tensor_that_is_not_contiguous():
    """It is copied for the exchange, and written back only where the result is adopted."""
    model = nn.Linear(3, 2, bias=False)
    model.weight = nn.Parameter(torch.arange(6.0).view(3, 2).t())
    assert not model.weight.is_contiguous()
    fragment = fragment_of(model)
    fragment.depart()
    with torch.no_grad():
        model.weight.add_(4)
    fragment.copy[0].add_(2)
    held = model.weight.detach().clone()
    fragment.begin()
    fragment.finish()
    assert torch.equal(model.weight, held)
    fragment.arrive("counted")
    assert torch.equal(model.weight, held - 1), "half way from 4 more to 2 more"

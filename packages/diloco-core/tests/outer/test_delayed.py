"""A fragment that is sent at one step and adopted later, on the CPU and on an accelerator."""

import pytest
import torch
from device_lab import PretendedAccelerator
from torch import nn

from diloco_core._arithmetic._layout import Piece
from diloco_core._model._partition import Buffers, split
from diloco_core._outer._delayed import DelayedFragment
from diloco_core._outer._device_copies import VALUES, DeviceCopies
from diloco_core._outer._groups import outer_factory
from diloco_core._outer._optimizer import OuterOptimizer
from diloco_core._terms._schedule import Schedule
from diloco_core._terms._terms import OuterGroup, Terms


def fragment_of(model, alpha=0.5, accelerator=None):
    (tensors,) = split(model, 1, Buffers.MEAN)
    outer = OuterOptimizer([OuterGroup(outer_factory(None, None, None, None))])
    terms = Terms(schedule=Schedule(1, 1, alpha=alpha))
    fragment = DelayedFragment("0", tensors, outer, 1, terms)
    if accelerator is not None:
        fragment._accelerator = accelerator
    fragment.take_snapshot()
    return fragment


def groups(fragment):
    return [Piece(index, 0, group.numel) for index, group in enumerate(fragment.layout.groups)]


def contributions(fragment):
    return [
        fragment.contributed(piece, fragment.copy[piece.group].new_empty(piece.numel)).clone()
        for piece in groups(fragment)
    ]


def mixed_model(dtype):
    """With a parameter that is not contiguous, one without values, and buffers."""
    generator = torch.Generator().manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2), nn.BatchNorm1d(2))
    model.register_parameter("empty", nn.Parameter(torch.empty(0)))
    model[1].weight = nn.Parameter(torch.empty(5, 2).t())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model.to(dtype)


def change(model, step):
    with torch.no_grad():
        for number, tensor in enumerate(model.state_dict().values()):
            tensor.add_((step + number) / 8 if tensor.is_floating_point() else step)


def two_syncs(fate, alpha, accelerator=None):
    """Everything that is sent, and everything that the model holds afterwards."""
    model = mixed_model(torch.bfloat16)
    fragment = fragment_of(model, alpha, accelerator)
    seen = []
    for sync in range(2):
        change(model, 1)
        fragment.depart()
        change(model, 2)
        fragment.collect()
        seen += contributions(fragment)
        seen.append(torch.tensor(sorted(fragment.unchanged())))
        if fate == "carried":
            fragment.progress()
        for copy in fragment.copy:
            copy.add_(sync + 0.75 if copy.is_floating_point() else 1)
        fragment.pack("counted")
        change(model, 3)
        fragment.arrive(fate)
        for copy in fragment.copy:
            copy.add_(1)  # as the next sync does
        seen += [tensor.clone() for tensor in model.state_dict().values()]
    return seen


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize(
    ("fate", "alpha"), [("counted", 0.25), ("carried", 0.25), ("carried", 1.0), ("dropped", 0.25)]
)
def test_the_values_are_those_of_a_model_on_the_cpu(fate, alpha, late):
    """A delta that was packed for another fate is packed once more."""
    ours = two_syncs(fate, alpha, PretendedAccelerator(late=late))
    assert all(map(torch.equal, ours, two_syncs(fate, alpha)))


def test_who_waits_for_whom():
    accelerator = PretendedAccelerator()
    fragment = fragment_of(mixed_model(torch.float32), 0.5, accelerator)

    def asked(act, *arguments):
        accelerator.asked.clear()
        act(*arguments)
        return accelerator.asked

    after_current = ["current: record", "side: wait for current"]
    copies = ["side: copy", "side: record"]
    assert asked(fragment.depart) == ["pinned memory", *after_current, *copies]
    for early in (contributions, lambda each: each.unchanged()):
        with pytest.raises(AssertionError, match=r"collect\(\)"):
            early(fragment)
    assert asked(fragment.collect) == ["CPU: wait"]
    assert asked(contributions, fragment) == []
    assert asked(fragment.unchanged) == []
    assert asked(fragment.pack, "counted") == ["CPU: wait"], "for the last copy of the buffer"
    assert asked(fragment.arrive, "counted") == [*copies, "current: wait for side", *after_current]


class TestBuffers:
    """The device has not even made the copies for which only its current stream waits."""

    def copies(self):
        self.values = [torch.arange(3.0), torch.arange(4.0, dtype=torch.bfloat16)]
        return DeviceCopies(self.values, PretendedAccelerator(current_is_late=True))

    def plus(self, number):
        return [values + number for values in self.values]

    def brought(self, copies):
        copies.pack(VALUES, self.plus(1))
        with copies.unpacked(VALUES) as parts:
            return [parts[VALUES, number] for number in range(2)]

    def test_they_are_not_written_to_before_the_copy_out_of_them(self):
        copies = self.copies()
        brought = self.brought(copies)
        copies.pack(VALUES, self.plus(2))
        assert all(map(torch.equal, brought, self.plus(1)))

    def test_values_are_taken_after_the_copy_out_of_them(self):
        copies = self.copies()
        brought = self.brought(copies)
        taken = copies.take(self.plus(2))
        assert all(map(torch.equal, taken(), self.plus(2)))
        assert all(map(torch.equal, brought, self.plus(1)))

    def test_what_is_on_the_cpu_is_copied_at_once(self):
        """With a model that is partly on an accelerator; here, one that is not on it at all."""

        class Elsewhere(PretendedAccelerator):
            def has_streams(self, device):
                return False

        values = [torch.arange(3.0)]
        taken = DeviceCopies(values, Elsewhere()).take(values)
        values[0].add_(1)
        assert torch.equal(taken()[0], torch.arange(3.0))

"""Copies between a model on an accelerator and the CPU: their order, and that nobody sees what is
not there yet.
"""

import itertools

import pytest
import torch
from device_lab import PretendedAccelerator
from torch import nn

from diloco_core._arithmetic._layout import Piece
from diloco_core._model._partition import Buffers, split
from diloco_core._outer._delayed import DelayedFragment
from diloco_core._outer._device_copies import VALUES, DeviceCopies
from diloco_core._outer._optimizer import OuterOptimizer, outer_factory
from diloco_core._terms._schedule import Schedule
from diloco_core._terms._terms import OuterGroup, Terms


def model_of(dtype):
    """With a parameter that is not contiguous, one without values, and buffers."""
    generator = torch.Generator().manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2), nn.BatchNorm1d(2))
    model.register_parameter("empty", nn.Parameter(torch.empty(0)))
    model[1].weight = nn.Parameter(torch.empty(5, 2).t())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model.to(dtype)


def fragment_of(model, alpha, accelerator=None):
    (tensors,) = split(model, 1, Buffers.MEAN)
    outer = OuterOptimizer([OuterGroup(outer_factory(None, None, None, None))])
    terms = Terms(schedule=Schedule(1, 1, alpha=alpha))
    fragment = DelayedFragment("0", tensors, outer, 1, terms)
    if accelerator is not None:
        fragment._accelerator = accelerator
    fragment.take_snapshot()
    return fragment


def change(model, step):
    with torch.no_grad():
        for number, tensor in enumerate(model.state_dict().values()):
            tensor.add_((step + number) / 8 if tensor.is_floating_point() else step)


def contributions(fragment):
    return [
        fragment.contributed(Piece(index, 0, group.numel), torch.empty(group.numel)).clone()
        for index, group in enumerate(fragment.layout.groups)
    ]


def two_syncs(fate, alpha, dtype, accelerator=None):
    """Everything that is sent, and everything that the model holds afterwards."""
    model = model_of(dtype)
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
        fragment.pack(fate)
        change(model, 3)
        fragment.arrive(fate)
        for copy in fragment.copy:
            copy.add_(1)  # as the next sync does
        seen += [tensor.clone() for tensor in model.state_dict().values()]
    return seen


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("fate", "alpha"),
    [*itertools.product(["counted", "carried"], [0.0, 0.25, 1.0]), ("dropped", 0.25)],
)
def test_the_values_are_those_of_a_model_on_the_cpu(fate, alpha, dtype, late):
    accelerator = PretendedAccelerator(late=late)
    ours = two_syncs(fate, alpha, dtype, accelerator)
    theirs = two_syncs(fate, alpha, dtype)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert accelerator.asked.count("pinned memory") == (2 if fate == "carried" and alpha < 1 else 1)


def test_who_waits_for_whom():
    accelerator = PretendedAccelerator()
    asked = accelerator.asked
    fragment = fragment_of(model_of(torch.float32), 0.5, accelerator)
    fragment.depart()
    assert asked == [
        "pinned memory",
        "current: record",
        "side: wait for current",
        "side: copy",
        "side: record",
    ]
    asked.clear()
    fragment.collect()
    assert asked == ["CPU: wait"]
    asked.clear()
    contributions(fragment)
    fragment.unchanged()
    assert asked == []
    fragment.pack("counted")
    assert asked == ["CPU: wait"], "for the last copy to or from the buffer"
    asked.clear()
    fragment.arrive("counted")
    assert asked == [
        "side: copy",
        "side: record",
        "current: wait for side",
        "current: record",
        "side: wait for current",
    ]


def test_what_was_not_packed_is_packed_when_it_arrives():
    accelerator = PretendedAccelerator()
    model = model_of(torch.float32)
    fragment = fragment_of(model, 0.0, accelerator)
    fragment.depart()
    fragment.collect()
    fragment.pack("counted")
    for copy in fragment.copy:
        copy.add_(1)
    fragment.arrive("dropped")
    held = [tensor.clone() for tensor in model.state_dict().values()]
    fragment.start_over()
    assert all(map(torch.equal, held, model.state_dict().values()))


def test_a_model_on_the_cpu_gets_no_pinned_memory():
    fragment = fragment_of(model_of(torch.float32), 0.5)
    fragment.depart()
    assert fragment._copies is None
    assert contributions(fragment)[0].numel(), "it is computed already"


def test_a_contribution_is_not_used_before_it_is_there():
    fragment = fragment_of(model_of(torch.float32), 0.5, PretendedAccelerator())
    fragment.depart()
    with pytest.raises(AssertionError, match=r"collect\(\)"):
        contributions(fragment)
    with pytest.raises(AssertionError, match=r"collect\(\)"):
        fragment.unchanged()


class TestBuffers:
    """The device has not even made the copies for which only its current stream waits."""

    def copies(self):
        self.values = [torch.arange(3.0), torch.arange(4.0, dtype=torch.bfloat16)]
        return DeviceCopies(self.values, PretendedAccelerator(current_is_late=True))

    def test_they_are_not_written_to_before_the_copy_out_of_them(self):
        copies = self.copies()
        copies.pack(VALUES, [values + 1 for values in self.values])
        with copies.unpacked(VALUES) as parts:
            brought = [parts[VALUES, number] for number in range(2)]
        copies.pack(VALUES, [values + 2 for values in self.values])
        assert all(map(torch.equal, brought, [values + 1 for values in self.values]))

    def test_values_are_taken_after_the_copy_out_of_them(self):
        copies = self.copies()
        copies.pack(VALUES, [values + 1 for values in self.values])
        with copies.unpacked(VALUES) as parts:
            brought = [parts[VALUES, number] for number in range(2)]
        taken = copies.take([values + 2 for values in self.values])
        assert all(map(torch.equal, taken.wait(), [values + 2 for values in self.values]))
        assert all(map(torch.equal, brought, [values + 1 for values in self.values]))

    def test_what_is_on_the_cpu_is_copied_at_once(self):
        """With a model that is partly on an accelerator; here, one that is not on it at all."""

        class Elsewhere(PretendedAccelerator):
            def has_streams(self, device):
                return False

        values = [torch.arange(3.0)]
        taken = DeviceCopies(values, Elsewhere()).take(values)
        values[0].add_(1)
        assert torch.equal(taken.wait()[0], torch.arange(3.0))

    def test_they_are_kept(self):
        copies = self.copies()
        first = copies.take(self.values).wait()
        second = copies.take(self.values).wait()
        assert [values.data_ptr() for values in first] == [values.data_ptr() for values in second]

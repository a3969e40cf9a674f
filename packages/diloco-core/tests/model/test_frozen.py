"""What is frozen at the start stays as it is: what follows the trained parameters would differ from
replica to replica.
"""

import pytest
import torch
from loop_lab import live, loop
from torch import nn

from diloco_core import ModelChangedError, in_process
from diloco_core.testing import run_replicas

READ_AT_ONCE = "diloco_core._model._frozen._READ_AT_ONCE"


class Distilled(nn.Module):
    """A network that is trained, and a frozen one that is to follow it."""

    def __init__(self):
        super().__init__()
        self.student = nn.Linear(3, 2)
        self.teacher = nn.Linear(3, 2).requires_grad_(False)


def pairs(model):
    return zip(model.teacher.parameters(), model.student.parameters(), strict=True)


def follow(model):
    with torch.no_grad():
        for teacher, student in pairs(model):
            teacher.lerp_(student, 0.5)


def follow_data(model):
    for teacher, student in pairs(model):
        teacher.data.mul_(0.5).add_(student.data, alpha=0.5)


def follow_by_assignment(model):
    for teacher, student in pairs(model):
        teacher.data = teacher.data * 0.5 + student.data * 0.5


def distilled(lab, exchange=None, **options):
    model, inner, outer, _ = loop(exchange, lab.fill(Distilled()), **options)
    return model, inner, outer


def refused(lab, change, steps=(0, 1), **options):
    """Change the teacher after the second of some steps; return the loop."""
    parts = distilled(lab, **options)
    with pytest.raises(ModelChangedError):
        live(*parts, *steps[:2], change, *steps[2:])
    return parts[2]


@pytest.mark.parametrize("change", [follow, follow_data, follow_by_assignment])
class TestValuesThatChange:
    def test_are_refused_at_the_next_sync(self, lab, change):
        def replica(exchange):
            return live(*distilled(lab, exchange), 0, change, 1, change).committed

        results = run_replicas(replica, in_process(2))
        assert any(isinstance(error, ModelChangedError) for error in results)
        assert all(isinstance(error, Exception) for error in results)
        named = next(error for error in results if isinstance(error, ModelChangedError))
        assert named.tensor == "teacher.weight" or named.tensor == "teacher.bias"
        assert "is not synced" in str(named)

    @pytest.mark.parametrize("flush", ["partial", "none"])
    def test_are_refused_at_the_end_whatever_their_size(self, lab, change, flush, monkeypatch):
        monkeypatch.setattr(READ_AT_ONCE, 1)
        refused(lab, change, flush=flush)


def test_all_have_their_turn(lab, monkeypatch):
    """Where nothing tells that values were changed, a part of them is read at every sync."""
    monkeypatch.setattr(READ_AT_ONCE, 16)
    found = []
    for changed in range(5):
        model = nn.ParameterList([torch.ones(4) for _ in range(6)])
        for number in range(5):
            model[number].requires_grad_(False)
        _, inner, outer, _ = loop(None, model, sync_every=1)
        act = lambda model, changed=changed: model[changed].data.add_(1.0)  # noqa: E731
        with pytest.raises(ModelChangedError) as caught:
            live(model, inner, outer, act, *range(5))
        assert caught.value.tensor == str(changed)
        found.append(outer.committed)
    assert sorted(found) == [0, 1, 2, 3, 4], "one of them at every sync"


@pytest.mark.parametrize("change", [follow, follow_by_assignment])
def test_what_was_written_to_is_read_at_once_whatever_its_size(lab, change, monkeypatch):
    monkeypatch.setattr(READ_AT_ONCE, 1)
    assert refused(lab, change, (0, 1, 2, 3), sync_every=3).committed == 0  # before the sync


def test_writing_the_same_values_is_no_change(lab):
    def write(model):
        model.load_state_dict(model.state_dict())
        model.teacher.weight.data = model.teacher.weight.data.clone()

    assert live(*distilled(lab), write, 0, write, 1, write, 2, 3).committed == 2


def test_values_may_be_loaded_until_the_block_is_entered(lab):
    parts = distilled(lab)
    follow(parts[0])
    assert live(*parts, 0).committed == 1


def test_a_frozen_part_from_inference_mode_is_left_alone():
    with torch.inference_mode():
        base = nn.Linear(2, 2).requires_grad_(False)
    model, inner, outer, _ = loop(None, nn.Sequential(base, nn.Linear(2, 2)))
    assert live(model, inner, outer, 0).committed == 1

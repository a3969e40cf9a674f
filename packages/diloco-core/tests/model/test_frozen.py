"""What is frozen at the start stays as it is: what follows the trained parameters would differ from
replica to replica.
"""

import pytest
import torch
from torch import nn

import diloco_core._model._frozen as frozen
from diloco_core import DiLoCo, ModelChangedError, in_process
from diloco_core._model._values import checksum
from diloco_core.testing import run_replicas


class Distilled(nn.Module):
    """A network that is trained, and a frozen one that is to follow it."""

    def __init__(self):
        super().__init__()
        self.student = nn.Linear(3, 2)
        self.teacher = nn.Linear(3, 2).requires_grad_(False)


def follow(model):
    with torch.no_grad():
        for teacher, student in zip(
            model.teacher.parameters(), model.student.parameters(), strict=True
        ):
            teacher.lerp_(student, 0.5)


def follow_data(model):
    for teacher, student in zip(
        model.teacher.parameters(), model.student.parameters(), strict=True
    ):
        teacher.data.mul_(0.5).add_(student.data, alpha=0.5)


def follow_by_assignment(model):
    for teacher, student in zip(
        model.teacher.parameters(), model.student.parameters(), strict=True
    ):
        teacher.data = teacher.data * 0.5 + student.data * 0.5


def distilled(lab, exchange, **options):
    model = lab.fill(Distilled())
    inner = torch.optim.SGD(model.student.parameters(), lr=1.0)
    return model, inner, DiLoCo(model, inner, exchange, **{"sync_every": 2, **options})


@pytest.mark.parametrize("change", [follow, follow_data, follow_by_assignment])
class TestValuesThatChange:
    def test_are_refused_at_the_next_sync(self, lab, change):
        def replica(exchange):
            model, inner, outer = distilled(lab, exchange)
            with outer:
                for step in range(2):
                    lab.push(model, inner, exchange.rank, step)
                    change(model)
            return outer.committed

        results = run_replicas(replica, in_process(2))
        assert any(isinstance(error, ModelChangedError) for error in results)
        assert all(isinstance(error, Exception) for error in results)
        named = next(error for error in results if isinstance(error, ModelChangedError))
        assert named.tensor == "teacher.weight" or named.tensor == "teacher.bias"
        assert "is not synced" in str(named)

    @pytest.mark.parametrize("flush", ["partial", "none"])
    def test_are_refused_at_the_end_whatever_their_size(self, lab, change, flush, monkeypatch):
        monkeypatch.setattr(frozen, "_READ_AT_ONCE", 1)
        model, inner, outer = distilled(lab, in_process(1)[0], flush=flush)

        def train():
            with outer:
                lab.push(model, inner, 0, 0)
                lab.push(model, inner, 0, 1)
                change(model)

        with pytest.raises(ModelChangedError):
            train()


def test_all_have_their_turn(lab, monkeypatch):
    """Where nothing tells that values were changed, a part of them is read at every sync."""
    monkeypatch.setattr(frozen, "_READ_AT_ONCE", 16)
    parameters = {
        str(number): nn.Parameter(torch.ones(4), requires_grad=False) for number in range(5)
    }
    for changed in parameters.values():
        values = frozen.FrozenValues(parameters)
        values.remember({id(parameter): checksum(parameter) for parameter in parameters.values()})
        changed.data.add_(1.0)
        found = 0
        for _ in parameters:
            try:
                values.check()
            except ModelChangedError:
                found += 1
        assert found == 1


@pytest.mark.parametrize("change", [follow, follow_by_assignment])
def test_what_was_written_to_is_read_at_once_whatever_its_size(lab, change, monkeypatch):
    monkeypatch.setattr(frozen, "_READ_AT_ONCE", 1)
    model, inner, outer = distilled(lab, in_process(1)[0])

    def train():
        with outer:
            lab.push(model, inner, 0, 0)
            change(model)
            lab.push(model, inner, 0, 1)

    with pytest.raises(ModelChangedError):
        train()
    assert outer.committed == 0  # before the sync


def test_writing_the_same_values_is_no_change(lab):
    model, inner, outer = distilled(lab, in_process(1)[0])
    with outer:
        for step in range(4):
            model.load_state_dict(model.state_dict())
            model.teacher.weight.data = model.teacher.weight.data.clone()
            lab.push(model, inner, 0, step)
    assert outer.committed == 2


def test_values_may_be_loaded_until_the_block_is_entered(lab):
    model, inner, outer = distilled(lab, in_process(1)[0])
    follow(model)
    with outer:
        lab.push(model, inner, 0, 0)
    assert outer.committed == 1


def test_a_frozen_part_from_inference_mode_is_left_alone(lab):
    with torch.inference_mode():
        base = nn.Linear(2, 2).requires_grad_(False)
    model = nn.Sequential(base, nn.Linear(2, 2))
    inner = torch.optim.SGD(model[1].parameters(), lr=1.0)
    with DiLoCo(model, inner, in_process(1)[0], sync_every=1) as outer:
        lab.push(model, inner, 0, 0)
    assert outer.committed == 1

"""Values that are changed or loaded inside the block do not go out as training progress."""

import copy
import io

import pytest
import torch
from loop_lab import exchanges, live, loop
from torch import nn

from diloco_core import ModelChangedError, ReplicaLostError, in_process
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


def test_all_have_their_turn(monkeypatch):
    """A part of the values is read at every sync if nothing tells that they were changed."""
    monkeypatch.setattr(READ_AT_ONCE, 16)
    results = []
    for changed in range(5):
        model = nn.ParameterList([torch.ones(4) for _ in range(6)])
        for number in range(5):
            model[number].requires_grad_(False)
        _, inner, outer, _ = loop(None, model, sync_every=1)
        act = lambda model, changed=changed: model[changed].data.add_(1.0)  # noqa: E731
        with pytest.raises(ModelChangedError) as caught:
            live(model, inner, outer, act, *range(5))
        assert caught.value.tensor == str(changed)
        results.append(outer.committed)
    assert sorted(results) == [0, 1, 2, 3, 4], "one of them at every sync"


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


def shifted(model, by=5.0):
    return {name: tensor + by for name, tensor in model.state_dict().items()}


def load_all(model):
    model.load_state_dict(shifted(model))


def load_a_part(model):
    model[0].load_state_dict(shifted(model[0]))


def load_one_tensor(model):
    model.load_state_dict({"2.bias": model[2].bias + 1}, strict=False)


def load_through_a_wrapper(model):
    torch.nn.Sequential(model).load_state_dict({f"0.{n}": t for n, t in shifted(model).items()})


def load_twice(model):
    load_all(model)
    load_all(model)


LOADS = [load_all, load_a_part, load_one_tensor, load_through_a_wrapper, load_twice]


def net(lab):
    return lab.fill(
        torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    )


def train(lab, exchange, change, *, before=1, after=6, at_rank=0, **options):
    """Step, act on the model, step again; return what is held and the number of syncs."""
    model = net(lab)
    inner = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    with loop(exchange, model, inner, **options)[2] as outer:
        for step in range(before + after):
            if step == before and exchange.rank == at_rank:
                change(model)
            lab.push(model, inner, exchange.rank, step)
    return lab.values(model), outer.committed


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("before", [0, 1])
def test_they_are_refused_before_the_next_sync(lab, load, before):
    loaded, other = run_replicas(lambda e: train(lab, e, load, before=before), in_process(2))
    assert isinstance(loaded, ModelChangedError)
    assert loaded.tensor == ("2.bias" if load is load_one_tensor else "0.weight")
    for way_out in ("before the block begins", "resume=True", "put the old values back"):
        assert way_out in str(loaded)
    assert isinstance(other, ReplicaLostError)


@pytest.mark.parametrize("options", [{}, {"flush": "none"}, {"delay": 1}, {"fragments": 2}])
def test_they_are_not_sent_where_the_block_is_left(lab, options):
    """Steps since the last sync are open then: they are synced, or saved for a resumed run."""
    model, inner, outer, _ = loop(*exchanges("store", 1), net(lab), sync_every=4, **options)

    def train_and_leave():
        with outer:
            for step in range(5):
                lab.push(model, inner, 0, step)
            load_all(model)

    with pytest.raises(ModelChangedError, match="were loaded into the model inside the block"):
        train_and_leave()


def averaged_and_back(model):
    """As an evaluation with averaged weights does."""
    held = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(shifted(model))
    model(torch.ones(1, 3))
    model.load_state_dict(held)


def by_hand_and_loaded_back(model):
    held = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    model.load_state_dict(held)


def the_same(model):
    model.load_state_dict(model.state_dict())


def a_copy_of_it(model):
    copied = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copied, torch.load(file, weights_only=False)):
        other.load_state_dict(shifted(model))


NOTHING = [averaged_and_back, by_hand_and_loaded_back, the_same, a_copy_of_it]


@pytest.mark.sampled
@pytest.mark.parametrize("change", NOTHING)
@pytest.mark.parametrize("options", [{}, {"delay": 1, "sync_every": 4}])
def test_what_is_put_back_is_nothing(lab, change, options):
    results = lab.run(lambda e: train(lab, e, change, **options), in_process(2))
    wanted = lab.run(lambda e: train(lab, e, lambda _: None, **options), in_process(2))
    assert [committed for _, committed in results] == [committed for _, committed in wanted]
    assert lab.identical([values for values, _ in results + wanted])


def test_a_file_that_the_model_is_saved_to_holds_nothing_of_ours(lab):
    model, _, outer, _ = loop(None, net(lab))
    with outer:
        file = io.BytesIO()
        torch.save(model, file)
        hooks = [hook for module in model.modules() for hook in module._load_state_dict_pre_hooks]
        assert hooks
    assert b"diloco" not in file.getvalue()
    assert not any(module._load_state_dict_pre_hooks for module in model.modules())

"""An inner optimizer that writes weights of its own back over what a sync has brought is noticed;
and no other one is.
"""

from contextlib import nullcontext

import pytest
import torch
from loop_lab import loop
from optimizers_lab import SOUND, MasterSGD, together, train

from diloco_core import ModelChangedError, in_process
from diloco_core._inner import _kept_weights


def refused(results, state, name):
    """Both have found out by themselves, or one has heard of the other."""
    errors = [result for result in results if isinstance(result, ModelChangedError)]
    assert errors, results
    for error in errors:
        assert error.tensor == name
        assert "has undone the last sync: it keeps a copy of the weights" in str(error)
        assert f"({state!r} in its state of parameter {name!r})" in str(error)
        assert "Use an optimizer that changes the model's own weights." in str(error)


def master(parameters):
    return MasterSGD(parameters, lr=0.05)


def test_master_weights_are_noticed_at_the_step_after_the_first_sync():
    results = together(master, dtype=torch.bfloat16, steps=21)
    refused(results, "master", "0.weight")
    assert "inner optimizer 0 (MasterSGD)" in str(results[0])
    # Before that step, nothing is wrong.
    results = together(master, dtype=torch.bfloat16, steps=20, flush="none")
    assert [outer.committed for outer in results] == [1, 1]


def test_of_several_optimizers_it_is_the_right_one():
    def two(parameters):
        return [torch.optim.AdamW(parameters[:2], lr=0.01), master(parameters[2:])]

    results = together(two, dtype=torch.bfloat16)
    refused(results, "master", "2.weight")
    assert any("inner optimizer 1 (MasterSGD)" in str(result) for result in results)


class WritesBack(MasterSGD):
    """Brings the parameter back to its fp32 weights after a sync; they stay, or they do not."""

    synced, stays = False, True

    @torch.no_grad()
    def step(self, closure=None):
        if not self.synced:
            super().step()
            return
        for parameter, state in self.state.items():
            parameter.copy_(state["master"])
            if not self.stays:
                state["master"].zero_()


@pytest.mark.parametrize("stays", [True, False])
def test_it_is_the_copy_that_counts_and_not_only_where_the_parameter_is(stays):
    model = torch.nn.ParameterList([torch.linspace(-1, 1, 100).bfloat16()])
    inner = WritesBack(model.parameters(), lr=0.05)
    inner.stays = stays
    _, _, outer, _ = loop(None, model, inner, sync_every=1, outer_lr=0.3, flush="none")

    def train():
        with outer:
            for inner.synced in (False, True):
                model[0].grad = torch.ones_like(model[0])
                inner.step()

    with pytest.raises(ModelChangedError) if stays else nullcontext():
        train()


@pytest.mark.parametrize("make", SOUND.values(), ids=SOUND)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_others_are_not_accused(make, dtype):
    for outer in together(make, dtype=dtype):
        assert outer.committed == 3


@pytest.mark.parametrize("make", ["AdamW", "ASGD"])
@pytest.mark.parametrize("fragments", [1, 2])
def test_others_are_not_accused_where_every_step_is_synced(make, fragments):
    for outer in together(SOUND[make], sync_every=fragments, fragments=fragments, steps=12):
        assert outer.committed >= 12


ALONE = {"outer_lr": 1.0, "outer_momentum": 0.0}
"""The outer step of one replica puts every value where the inner steps have brought it."""


def test_a_replica_alone_that_changes_nothing_is_not_accused():
    assert train(in_process(1)[0], master, dtype=torch.bfloat16, **ALONE).committed == 3


def test_no_values_are_read_where_nothing_wider_is_kept(monkeypatch):
    """On an accelerator, reading them would wait for all that it has still to do."""
    read, values = [], _kept_weights._values

    def counted(tensor, dtype=None):
        read.append(tensor)
        return values(tensor, dtype)

    monkeypatch.setattr(_kept_weights, "_values", counted)
    train(in_process(1)[0], torch.optim.AdamW, dtype=torch.float32)
    assert not read
    train(in_process(1)[0], master, dtype=torch.bfloat16, **ALONE)
    assert read

"""A tensor belongs to one outer loop at a time."""

import gc

import pytest
import torch
from torch import nn
from watch_lab import Net

from diloco_core import (
    ConfigurationError,
    DiLoCo,
    ModelChangedError,
    UnseenStepsError,
    in_process,
)


class TestOneLoopForEveryTensor:
    """Two loops around one model would change each other's results, whatever their optimizers."""

    MESSAGE = r"another outer loop in use also holds '{}', and at least one of the two syncs it"

    def loop(self, model, **options):
        inner = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
        return DiLoCo(model, inner, in_process(1)[0], sync_every=1, **options)

    def test_a_second_one_around_the_same_model_is_refused(self, lab):
        model = lab.fill(Net())
        early = self.loop(model)
        with self.loop(model) as outer:
            for again in (early.__enter__, lambda: self.loop(model)):
                with pytest.raises(ConfigurationError, match=self.MESSAGE.format("[a-z.]+")):
                    again()
            with pytest.raises(ConfigurationError, match=self.MESSAGE.format("weight")):
                self.loop(model.head)
            lab.push(model, outer._inner.steps.optimizers[0], 0, 0)
        assert outer.committed == 1
        with early:
            pass

    def test_so_is_one_that_trains_what_the_other_keeps_frozen(self, lab):
        model = lab.fill(Net())
        frozen = self.loop(model)
        model.base.requires_grad_(True)
        trained, later = (self.loop(nn.Sequential(model.base, nn.Linear(3, 2))) for _ in range(2))
        with trained, pytest.raises(ConfigurationError, match=self.MESSAGE.format("base.weight")):
            frozen.__enter__()
        model.base.requires_grad_(False)
        with frozen, pytest.raises(ConfigurationError, match=self.MESSAGE.format("0.weight")):
            later.__enter__()

    @pytest.mark.parametrize("buffers", ["mean", "none"])
    def test_memory_decides_and_so_do_buffers(self, lab, buffers):
        model, other = lab.fill(Net()), lab.fill(Net())
        with self.loop(model, buffers=buffers):
            other.body.weight.data = model.body.weight.data
            with pytest.raises(ConfigurationError, match=self.MESSAGE.format("body.weight")):
                self.loop(other)
            other = lab.fill(Net())
            other.mean = model.mean = torch.zeros(3)
            with pytest.raises(ConfigurationError, match=self.MESSAGE.format("mean")):
                self.loop(other)

    def test_one_that_is_refused_does_not_count_steps(self, lab):
        model = lab.fill(Net())
        inner = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)

        def train():
            with self.loop(model):
                with pytest.raises(ConfigurationError):
                    DiLoCo(model, inner, in_process(1)[0], sync_every=1)
                lab.push(model, inner, 0, 0)

        with pytest.raises(UnseenStepsError):  # the loop's that is under way
            train()

    def test_what_both_keep_frozen_may_be_shared_and_so_may_storage_that_is_apart(self, lab):
        flat = torch.zeros(24)
        first, second = lab.fill(Net()), lab.fill(Net())
        second.base = first.base
        first.body.weight.data, second.body.weight.data = flat[:9].view(3, 3), flat[9:18].view(3, 3)
        with self.loop(first), self.loop(second):
            pass

    @pytest.mark.parametrize("how", ["failed in the block", "failed at the start", "forgotten"])
    def test_one_that_is_over_is_in_nobodys_way(self, lab, how):
        model = lab.fill(Net())
        outer = self.loop(model)
        if how == "failed at the start":
            model.base.requires_grad_(True)
            with pytest.raises(ModelChangedError):
                outer.__enter__()
            model.base.requires_grad_(False)
        elif how == "forgotten":
            outer.__enter__()
            del outer
            gc.collect()
        else:
            with pytest.raises(ZeroDivisionError), outer:
                raise ZeroDivisionError
        with self.loop(model):
            pass

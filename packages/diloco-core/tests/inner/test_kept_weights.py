"""An inner optimizer that writes weights of its own back over what a sync has brought is noticed; and no other one is."""

from contextlib import nullcontext

import pytest
import torch

from diloco_core import DiLoCo, ModelChangedError, in_process
from diloco_core._inner import _kept_weights
from diloco_core._inner._kept_weights import KeptWeights
from diloco_core.testing import run_replicas


class MasterSGD(torch.optim.SGD):
    """Keeps fp32 weights of bf16 parameters, as mixed-precision optimizers do."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    master = state.setdefault("master", parameter.detach().float().clone())
                    master -= group["lr"] * parameter.grad.float()
                    parameter.copy_(master)


class FromTheStart(torch.optim.SGD):
    """Keeps the weights that it began with, and does not write them back."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault("p0", parameter.detach().clone())
        return super().step(closure)


class KeepsLast(torch.optim.SGD):
    """Keeps a copy of what it has written, in fp32, and does not write it back."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["last"] = parameter.detach().float().clone()


class Stubborn(torch.Tensor):
    """A tensor that supports no operation, as those of quantized states support only a few."""

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), keywords=None):
        if getattr(function, "__name__", "") in {"__get__", "detach"}:
            return super().__torch_function__(function, types, arguments, keywords or {})
        raise NotImplementedError(function)


def holds(make):
    """An optimizer that keeps a tensor of the parameter's shape."""

    class Holds(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            super().step(closure)
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter]["held"] = make(parameter.detach())

    return lambda parameters: Holds(parameters, lr=0.05)


def model_of(dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(6, 20), torch.nn.Tanh(), torch.nn.Linear(20, 1)).to(
        dtype
    )


def train(exchange, make, *, dtype=torch.float32, steps=45, sync_every=20, frozen=False, **options):
    model = model_of(dtype)
    model[0].weight.requires_grad_(not frozen)
    inner = make([parameter for parameter in model.parameters() if parameter.requires_grad])
    generator = torch.Generator().manual_seed(exchange.rank)
    with DiLoCo(model, inner, exchange, sync_every=sync_every, **options) as outer:
        for _ in range(steps):
            inputs = torch.randn(16, 6, generator=generator)
            wanted = inputs.sum(1, keepdim=True) * (1 + exchange.rank)
            (model(inputs.to(dtype)) - wanted.to(dtype)).pow(2).mean().backward()
            inner.step()
            inner.zero_grad()
    return outer


def together(make, **options):
    """Two replicas that learn from different data; what each returned or raised."""
    return run_replicas(lambda exchange: train(exchange, make, **options), in_process(2))


def refused(results, state, name):
    """Both have found out by themselves, or one has heard of the other."""
    errors = [result for result in results if isinstance(result, ModelChangedError)]
    assert errors, results
    for error in errors:
        assert error.tensor == name
        assert "has undone the last sync: it keeps a copy of the weights" in str(error)
        assert f"({state!r} in its state of parameter {name!r})" in str(error)
        assert "Use an optimizer that changes the model's own weights." in str(error)


def test_master_weights_are_noticed_at_the_step_after_the_first_sync():
    results = together(lambda p: MasterSGD(p, lr=0.05), dtype=torch.bfloat16, steps=21)
    refused(results, "master", "0.weight")
    assert "inner optimizer 0 (MasterSGD)" in str(results[0])


def test_before_that_step_nothing_is_wrong():
    results = together(
        lambda p: MasterSGD(p, lr=0.05), dtype=torch.bfloat16, steps=20, flush="none"
    )
    assert [outer.committed for outer in results] == [1, 1]


def test_of_several_optimizers_it_is_the_right_one():
    def two(parameters):
        return [
            torch.optim.AdamW(parameters[:2], lr=0.01),
            MasterSGD(parameters[2:], lr=0.05),
        ]

    def both(exchange):
        model = model_of(torch.bfloat16)
        inner = two(list(model.parameters()))
        generator = torch.Generator().manual_seed(exchange.rank)
        with DiLoCo(model, inner, exchange, sync_every=20):
            for _ in range(41):
                inputs = torch.randn(16, 6, generator=generator)
                wanted = inputs.sum(1, keepdim=True) * (1 + exchange.rank)
                (model(inputs.bfloat16()) - wanted.bfloat16()).pow(2).mean().backward()
                for optimizer in inner:
                    optimizer.step()
                    optimizer.zero_grad()

    results = run_replicas(both, in_process(2))
    refused(results, "master", "2.weight")
    assert any("inner optimizer 1 (MasterSGD)" in str(result) for result in results)


@pytest.mark.parametrize("written_back", [True, False])
def test_it_is_the_copy_that_counts_and_not_only_where_the_parameter_is(written_back):
    parameter = torch.nn.Parameter(torch.linspace(-1, 1, 100).bfloat16())
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    master = optimizer.state[parameter]["master"] = torch.linspace(-1, 1, 100)
    trained = parameter.detach().clone()
    kept = KeptWeights([optimizer], {id(parameter): "weight"})
    kept.before_sync()
    with torch.no_grad():
        parameter.zero_()
        kept.after_sync()
        parameter.copy_(trained)
        if not written_back:
            master.zero_()
    with pytest.raises(ModelChangedError) if written_back else nullcontext():
        kept.check(0)


SOUND = {
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.02),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.05),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "weights of the start": lambda p: FromTheStart(p, lr=0.05),
    "nothing moves": lambda p: FromTheStart(p, lr=0.0),
    "last weights": lambda p: KeepsLast(p, lr=0.01),
    "float8": holds(lambda p: p.to(torch.float8_e4m3fn)),
    "complex": holds(lambda p: p.to(torch.complex64)),
    "whole numbers": holds(lambda p: p.to(torch.int64)),
    "a subclass": holds(lambda p: p.double().as_subclass(Stubborn)),
    "not contiguous": holds(lambda p: p.double().unsqueeze(-1).repeat(*[1] * p.dim(), 2)[..., 0]),
}


@pytest.mark.parametrize("make", SOUND.values(), ids=SOUND)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_others_are_not_accused(make, dtype):
    for outer in together(make, dtype=dtype):
        assert outer.committed == 3


@pytest.mark.parametrize("make", [SOUND["AdamW"], SOUND["ASGD"]], ids=["AdamW", "ASGD"])
@pytest.mark.parametrize("fragments", [1, 2])
def test_others_are_not_accused_where_every_step_is_synced(make, fragments):
    for outer in together(make, sync_every=fragments, fragments=fragments, steps=12):
        assert outer.committed >= 12


def test_a_replica_alone_that_changes_nothing_is_not_accused():
    """Its outer step puts every value where the inner steps have brought it."""
    (exchange,) = in_process(1)
    outer = train(
        exchange,
        lambda p: MasterSGD(p, lr=0.05),
        dtype=torch.bfloat16,
        outer_lr=1.0,
        outer_momentum=0.0,
    )
    assert outer.committed == 3


def test_no_values_are_read_where_nothing_wider_is_kept(monkeypatch):
    """On an accelerator, reading them would wait for all that it has still to do."""
    read = []

    def counted(tensor, dtype=None):
        read.append(tensor)
        return values(tensor, dtype)

    values = _kept_weights._values
    monkeypatch.setattr(_kept_weights, "_values", counted)
    (exchange,) = in_process(1)
    train(exchange, torch.optim.AdamW, dtype=torch.float32)
    assert not read
    (exchange,) = in_process(1)
    train(
        exchange,
        lambda p: MasterSGD(p, lr=0.05),
        dtype=torch.bfloat16,
        outer_lr=1.0,
        outer_momentum=0.0,
    )
    assert read

"""An inner optimizer that keeps weights of its own and writes them back is named."""

import pytest
import torch

from diloco_core import DiLoCo, ModelChangedError, in_process
from diloco_core._inner._own_weights import OwnWeights
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


def train(exchange, make, *, dtype=torch.float32, steps=45, sync_every=20, **options):
    model = model_of(dtype)
    inner = make(list(model.parameters()))
    several = inner if isinstance(inner, list) else [inner]
    generator = torch.Generator().manual_seed(exchange.rank)
    with DiLoCo(model, inner, exchange, sync_every=sync_every, **options) as outer:
        for _ in range(steps):
            inputs = torch.randn(16, 6, generator=generator)
            wanted = inputs.sum(1, keepdim=True) * (1 + exchange.rank)
            (model(inputs.to(dtype)) - wanted.to(dtype)).pow(2).mean().backward()
            for optimizer in several:
                optimizer.step()
                optimizer.zero_grad()
    return outer


def together(make, **options):
    """Two replicas that learn from different data; what each returned or raised."""
    return run_replicas(lambda exchange: train(exchange, make, **options), in_process(2))


def parameters_of(optimizer):
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class ScheduleFree(torch.optim.Optimizer):
    """SGD without a schedule: gradients are taken between an average and the trained ``z``."""

    def __init__(self, parameters, lr=0.05, beta=0.9, weight_decay=0.01):
        super().__init__(parameters, {"lr": lr, "beta": beta, "weight_decay": weight_decay, "k": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            share = 1 / group["k"]
            for y in group["params"]:
                z = self.state[y].setdefault("z", y.detach().clone())
                gradient = y.grad.add(y, alpha=group["weight_decay"])
                y.lerp_(z, share)
                y.sub_(gradient, alpha=group["lr"] * (1 - group["beta"] * (1 - share)))
                z.sub_(gradient, alpha=group["lr"])


class Lookahead(torch.optim.Optimizer):
    """Returns half way to its slow weights after every k steps of the optimizer that it wraps."""

    def __init__(self, inner, k=5):
        self.inner, self.k = inner, k
        super().__init__(parameters_of(inner), {"count": 0, "lr": 1.0})
        for parameter in parameters_of(self):
            self.state[parameter]["slow"] = parameter.detach().clone()

    @torch.no_grad()
    def step(self, closure=None):
        self.inner.step()
        self.param_groups[0]["count"] += 1
        if self.param_groups[0]["count"] % self.k == 0:
            for parameter in parameters_of(self):
                parameter.copy_(self.state[parameter]["slow"].lerp_(parameter, 0.5))


class InAttribute(torch.optim.SGD):
    """Lookahead whose slow weights are in an attribute: a list, or a table by parameter."""

    def __init__(self, parameters, k, table=False):
        super().__init__(parameters, lr=0.05)
        self.k, self.count, self.table, self.slow = k, 0, table, None

    @torch.no_grad()
    def step(self, closure=None):
        mine = parameters_of(self)
        if self.slow is None:
            slow = [p.detach().clone() for p in mine]
            self.slow = dict(zip(mine, slow, strict=True)) if self.table else slow
        super().step()
        self.count += 1
        if self.count % self.k == 0:
            slow = [self.slow[p] for p in mine] if self.table else self.slow
            torch._foreach_lerp_(slow, mine, 0.5)
            torch._foreach_copy_(mine, slow)


class Anchored(torch.optim.SGD):
    """Pulls the weights towards the initial ones, which are those of all replicas (L2-SP)."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for parameter in self.param_groups[0]["params"]:
            anchor = self.state[parameter].setdefault("anchor", parameter.detach().clone())
            parameter.lerp_(anchor, 0.001)


class KeepsMomentum(torch.optim.Optimizer):
    """A momentum in an attribute."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.01})
        self.velocities = [torch.zeros_like(p) for p in self.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        for p, v in zip(self.param_groups[0]["params"], self.velocities, strict=True):
            v.mul_(0.9).add_(p.grad)
            p.sub_(v, alpha=0.01)


class Velocity(torch.optim.Optimizer):
    """A momentum that is added, as some write it."""

    def __init__(self, parameters, sign):
        super().__init__(parameters, {"lr": 0.01, "sign": sign, "maximize": sign < 0})

    @torch.no_grad()
    def step(self, closure=None):
        sign = self.param_groups[0]["sign"]
        for parameter in parameters_of(self):
            v = self.state[parameter].setdefault("v", torch.zeros_like(parameter))
            v.mul_(0.9).add_(parameter.grad, alpha=-0.01 * sign)
            parameter.add_(v, alpha=sign)


class OwnAdam(torch.optim.AdamW):
    """As somebody's own: torch's are not tried out."""


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
    "what never changes": lambda p: Anchored(p, lr=0.01),
    "a momentum": KeepsMomentum,
    "weights at a limit": lambda p: Clamped(p, lr=1e-3, momentum=0.5),
    "own Adam": lambda p: OwnAdam(p, lr=0.01, weight_decay=0.1),
    "AMSGrad": lambda p: OwnAdam(p, lr=0.01, weight_decay=0.1, amsgrad=True, foreach=True),
    "fused": lambda p: OwnAdam(p, lr=0.01, weight_decay=0.1, fused=True),
}

OWN = {
    "schedule-free": (ScheduleFree, "z"),
    "Lookahead": (lambda p: Lookahead(torch.optim.SGD(p, lr=0.05, momentum=0.9)), "slow"),
    "Lookahead around Adam": (lambda p: Lookahead(torch.optim.Adam(p, lr=0.01), k=10), "slow"),
}


@pytest.mark.sampled
@pytest.mark.parametrize("make", OWN)
@pytest.mark.parametrize("options", [{}, {"delay": 3}, {"fragments": 2}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_is_named_at_the_first_sync(make, options, dtype):
    made, name = OWN[make]
    results = together(made, dtype=dtype, steps=21, sync_every=20, **options)
    errors = [result for result in results if isinstance(result, ModelChangedError)]
    assert errors, results
    for error in errors:
        assert error.tensor == "0.weight"
        assert f"keeps weights of its own ({name!r} in its state of parameter '0.weight')" in str(
            error
        )
        assert "AveragedModel" in str(error)


@pytest.mark.parametrize("table", [False, True])
@pytest.mark.parametrize("k", [5, 100])
def test_it_is_named_if_it_keeps_them_in_an_attribute(k, table):
    """It may write them back long after the sync, and of more parameters than are tried out."""
    model = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(3)))
    optimizer = InAttribute(model.parameters(), k, table)
    for _ in range(3):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    with pytest.raises(ModelChangedError, match=r"of its own \(its attribute 'slow'\)"):
        OwnWeights([optimizer], {}).check()


class Mixed(torch.optim.Optimizer):
    """Schedule-free with both sequences in the state; it never reads the model, a mix of them."""

    def __init__(self, parameters, lr=0.05):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state.update(z=parameter.clone(), x=parameter.clone())
            state["z"].sub_(parameter.grad, alpha=self.param_groups[0]["lr"])
            state["x"].lerp_(state["z"], 0.1)
            parameter.copy_(state["x"]).lerp_(state["z"], 0.1)


class Clamped(torch.optim.SGD):
    """Keeps all weights within limits, which most of them reach."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for parameter in self.param_groups[0]["params"]:
            parameter.clamp_(-0.01, 0.01)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda p: Lookahead(torch.optim.SGD(p, lr=0.05), k=100), "'slow' in its state"),
        (Mixed, "Mixed makes the model's weights anew at every step"),
    ],
)
def test_it_is_named_if_it_writes_them_back_late_or_makes_them_anew(make, text):
    assert any(text in str(result) for result in together(make, steps=21))


@pytest.mark.sampled
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("sync_every", [1, 20])
def test_a_momentum_is_not_taken_for_weights(sign, sync_every):
    for outer in together(lambda p: Velocity(p, sign), sync_every=sync_every, steps=20):
        assert outer.committed == 20 // sync_every


@pytest.mark.sampled
@pytest.mark.parametrize("name", [*OWN, *SOUND])
def test_trying_an_optimizer_out_changes_nothing(name):
    """Also where a learning rate schedule has put its own function in place of ``step``."""
    torch.manual_seed(3)
    model = torch.nn.Linear(9, 5)
    make = OWN[name][0] if name in OWN else SOUND[name]
    optimizer = make(list(model.parameters()))
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 9)).sum().backward()
        optimizer.step()
    held = lambda: [each.clone() for p in model.parameters() for each in (p, p.grad)]  # noqa: E731
    before, called = held(), []
    optimizer.register_step_post_hook(lambda *_: called.append(1))
    try:
        OwnWeights([optimizer], {}).check()
    except ModelChangedError:
        assert name in OWN
    else:
        assert name in SOUND
    assert all(map(torch.equal, before, held()))
    assert not called


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


@pytest.mark.sampled
@pytest.mark.parametrize("make", SOUND.values(), ids=SOUND)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_others_are_not_accused(make, dtype):
    for outer in together(make, dtype=dtype):
        assert outer.committed == 3


@pytest.mark.sampled
@pytest.mark.parametrize("make", ["AdamW", "ASGD"])
@pytest.mark.parametrize("fragments", [1, 2])
def test_others_are_not_accused_where_every_step_is_synced(make, fragments):
    for outer in together(SOUND[make], sync_every=fragments, fragments=fragments, steps=12):
        assert outer.committed >= 12


ALONE = {"outer_lr": 1.0, "outer_momentum": 0.0}
"""The outer step of one replica puts every value where the inner steps have brought it."""


def test_a_replica_alone_that_changes_nothing_is_not_accused():
    assert train(in_process(1)[0], master, dtype=torch.bfloat16, **ALONE).committed == 3

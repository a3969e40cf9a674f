"""Inner optimizers that keep weights, some of which write them back, and training with them."""

import torch

from diloco_core import DiLoCo, in_process
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

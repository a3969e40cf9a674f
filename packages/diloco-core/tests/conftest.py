"""What the tests of the outer loop share: how replicas are run, filled, pushed and compared."""

from types import SimpleNamespace

import pytest
import torch

from diloco_core import DiLoCo
from diloco_core.testing import run_replicas


def run(train, exchanges):
    """``train(exchange)`` in one thread per replica; what each returned. Errors of all replicas are raised together."""
    results = run_replicas(train, exchanges)
    errors = [result for result in results if isinstance(result, BaseException)]
    if errors:
        raise BaseExceptionGroup("replicas failed", errors)
    return results


def fill(model, seed=0):
    """Give a model the same random values everywhere: torch's global generator is shared between threads."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def push(model, inner, rank, step):
    """An inner step whose gradients depend on rank, step and element, and on nothing else."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    for parameter in model.parameters():
        if parameter.requires_grad:
            gradient = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.grad = gradient.mul(0.1).to(parameter.dtype)
    inner.step()


def values(model):
    """A copy of everything that a model holds."""
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def identical(runs):
    """Whether all replicas hold the same bytes."""
    return all(
        run.keys() == runs[0].keys() and all(torch.equal(run[name], runs[0][name]) for name in run) for run in runs
    )


def train(make_model, exchanges, steps=4, **options):
    """Replicas under plain inner SGD with the gradients of ``push``; what each model holds at the end."""

    def replica(exchange):
        model = make_model(exchange.rank)
        inner = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
        with DiLoCo(model, inner, exchange, **{"sync_every": 2, **options}):
            for step in range(steps):
                push(model, inner, exchange.rank, step)
        return values(model)

    return run(replica, exchanges)


@pytest.fixture(scope="session")
def lab():
    """The functions above."""
    return SimpleNamespace(run=run, fill=fill, push=push, values=values, identical=identical, train=train)

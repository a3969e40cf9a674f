"""The outer step is torch's own on the mean pseudo-gradient, for every allowed optimizer."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from diloco_core import DiLoCo, in_process

OPTIMIZERS = {
    "plain SGD": (torch.optim.SGD, {"lr": 0.7}),
    "heavy ball": (torch.optim.SGD, {"lr": 0.7, "momentum": 0.9}),
    "Nesterov": (torch.optim.SGD, {"lr": 0.7, "momentum": 0.9, "nesterov": True}),
    "fused": (torch.optim.SGD, {"lr": 0.7, "momentum": 0.9, "nesterov": True, "fused": True}),
    "weight decay": (torch.optim.SGD, {"lr": 0.7, "momentum": 0.9, "weight_decay": 0.01}),
    "dampening": (torch.optim.SGD, {"lr": 0.7, "momentum": 0.9, "dampening": 0.5}),
    "Adam": (torch.optim.Adam, {"lr": 0.1}),
    "AMSGrad": (torch.optim.Adam, {"lr": 0.1, "amsgrad": True, "weight_decay": 0.1}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.1, "betas": (0.8, 0.95)}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.1}),
    "RAdam": (torch.optim.RAdam, {"lr": 0.1}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.1}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 0.5}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.1, "momentum": 0.5, "centered": True}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.1}),
    "ASGD": (torch.optim.ASGD, {"lr": 0.1, "t0": 2}),
}


def factory(name):
    kind, options = OPTIMIZERS[name]
    return lambda parameters: kind(parameters, **options)


def start_values(shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def movement(rank, step, number, shape):
    """How far an inner step takes a parameter."""
    generator = torch.Generator().manual_seed(10_000 * rank + 100 * step + number)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def reference(name, shapes, replicas, steps):
    """DiLoCo written down plainly: every parameter is a fragment, and one is synced after every
    inner step, in turn.
    """
    parameters = [nn.Parameter(value) for value in start_values(shapes)]
    outers = [factory(name)([parameter]) for parameter in parameters]
    local = [[parameter.detach().clone() for parameter in parameters] for _ in range(replicas)]

    def sync(number):
        parameter = parameters[number]
        deltas = [parameter.detach() - own[number] for own in local]
        parameter.grad = sum(deltas[1:], deltas[0].clone()) / replicas
        outers[number].step()
        for own in local:
            own[number].copy_(parameter.detach())

    for step in range(steps):
        for rank, own in enumerate(local):
            for number, shape in enumerate(shapes):
                own[number] -= movement(rank, step, number, shape)
        sync(step % len(shapes))
    # At the end the flush syncs all fragments but the one just synced.
    for turn in range(steps, steps + len(shapes) - 1):
        sync(turn % len(shapes))
    return [parameter.detach() for parameter in parameters]


def ours(name, shapes, steps):
    def replica(exchange):
        model = nn.ParameterList(start_values(shapes))
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        fragments = len(shapes)
        options = {"sync_every": fragments, "fragments": fragments}
        with DiLoCo(model, inner, exchange, outer_optimizer=factory(name), **options):
            for step in range(steps):
                for number, parameter in enumerate(model):
                    parameter.grad = movement(exchange.rank, step, number, parameter.shape)
                inner.step()
        return [parameter.detach() for parameter in model]

    return replica


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
@settings(deadline=None, max_examples=5)
@given(
    shapes=st.lists(
        st.lists(st.integers(1, 6), max_size=3).map(tuple) | st.tuples(st.integers(1, 90)),
        min_size=1,
        max_size=3,
    ),
    replicas=st.integers(1, 4),
    chunk_bytes=st.sampled_from([8, 24, 100, 200, 2**20]),
    steps=st.integers(1, 7),
)
# Shards that cut through parameters.
@example(shapes=[(7, 5), (40,)], replicas=3, chunk_bytes=100, steps=6)
def test_the_outer_step_is_torchs_own_on_the_mean_pseudo_gradient(
    lab, name, shapes, replicas, chunk_bytes, steps
):
    wanted = reference(name, shapes, replicas, steps)
    runs = lab.run(ours(name, shapes, steps), in_process(replicas, chunk_bytes=chunk_bytes))
    for run in runs:
        for mine, theirs in zip(run, wanted, strict=True):
            assert torch.allclose(mine, theirs, rtol=1e-12, atol=1e-12)
        assert all(map(torch.equal, run, runs[0])), "all replicas hold the same bytes"


@pytest.mark.parametrize("chunk_bytes", [128, 333, 1000, 4096])
def test_the_numbers_do_not_depend_on_the_chunk_size(lab, chunk_bytes):
    """Vectorised kernels round tails differently: chunks must not move them about."""

    def make(rank):
        return lab.fill(nn.Linear(70, 31))

    wanted = lab.train(make, in_process(3))
    assert lab.identical([*lab.train(make, in_process(3, chunk_bytes=chunk_bytes)), *wanted])

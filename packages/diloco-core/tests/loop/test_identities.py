"""Identities that hold whatever the model: FedAvg, synchronous training, any exchange."""

import pytest
import torch
from loop_lab import AVERAGING
from torch import nn

from diloco_core import DiLoCo, in_process


def net():
    """Two layers in float64, equal everywhere."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def batches(rank, count):
    generator = torch.Generator().manual_seed(100 + rank)
    return list(torch.randn(count, 4, 3, generator=generator, dtype=torch.float64))


def inner_step(model, inner, *losses):
    """One step on the mean of the losses."""
    (sum(losses) / len(losses)).backward()
    inner.step()
    inner.zero_grad()


def loss(model, batch):
    return model(batch).square().mean()


def flat(model):
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def replica(make_inner, data=None, steps=12, **options):
    """A replica's training; its parameters after every inner step, and at the end."""

    def train(exchange):
        model = net()
        inner = make_inner(model.parameters())
        own = batches(exchange.rank, steps) if data is None else data
        seen = []
        with DiLoCo(model, inner, exchange, **options):
            for batch in own[:steps]:
                inner_step(model, inner, loss(model, batch))
                seen.append(flat(model))
        return [*seen, flat(model)]

    return train


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.05)


INNER = pytest.mark.parametrize("make_inner", [sgd, adamw])


def same(ours, theirs):
    return len(ours) == len(theirs) and all(
        torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(ours, theirs, strict=True)
    )


@INNER
def test_outer_sgd_with_lr_1_is_federated_averaging(lab, make_inner):
    models = [net() for _ in range(3)]
    inners = [make_inner(model.parameters()) for model in models]
    data = [batches(rank, 12) for rank in range(3)]
    wanted = [[] for _ in models]
    for step in range(12):
        for rank, (model, inner) in enumerate(zip(models, inners, strict=True)):
            inner_step(model, inner, loss(model, data[rank][step]))
        if step % 4 == 3:
            mean = torch.stack([flat(model) for model in models]).mean(0)
            for model in models:
                nn.utils.vector_to_parameters(mean.clone(), model.parameters())
        for rank, model in enumerate(models):
            wanted[rank].append(flat(model))
    runs = lab.run(replica(make_inner, sync_every=4, **AVERAGING), in_process(3))
    for rank, seen in enumerate(runs):
        assert same(seen[:-1], wanted[rank]), "after every inner step, not only at the end"


def test_a_sync_per_step_of_sgd_is_synchronous_data_parallel_training(lab):
    model, wanted = net(), []
    inner = sgd(model.parameters())
    for together in zip(*(batches(rank, 12) for rank in range(3)), strict=True):
        inner_step(model, inner, *(loss(model, batch) for batch in together))
        wanted.append(flat(model))
    for seen in lab.run(replica(sgd, sync_every=1, **AVERAGING), in_process(3)):
        assert same(seen[:-1], wanted)

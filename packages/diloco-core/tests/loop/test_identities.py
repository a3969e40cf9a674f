"""Identities that hold whatever the model: FedAvg, the plain optimizer, one replica, synchronous
training, any exchange.
"""

import itertools

import pytest
import torch
from loop_lab import AVERAGING, exchanges
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


@INNER
def test_one_replica_with_a_sync_per_step_is_the_plain_optimizer(lab, make_inner):
    model, wanted = net(), []
    inner = make_inner(model.parameters())
    for batch in batches(0, 12):
        inner_step(model, inner, loss(model, batch))
        wanted.append(flat(model))
    (seen,) = lab.run(replica(make_inner, sync_every=1, **AVERAGING), in_process(1))
    assert same(seen[:-1], wanted)


@pytest.mark.parametrize("fragments", [1, 2, 4])
def test_identical_replicas_are_one(lab, fragments):
    train = replica(adamw, data=batches(0, 14), steps=14, sync_every=4, fragments=fragments)
    (one,) = lab.run(train, in_process(1))
    for seen in lab.run(train, in_process(4)):
        assert same(seen, one)


def test_a_sync_per_step_of_sgd_is_synchronous_data_parallel_training(lab):
    model, wanted = net(), []
    inner = sgd(model.parameters())
    for together in zip(*(batches(rank, 12) for rank in range(3)), strict=True):
        inner_step(model, inner, *(loss(model, batch) for batch in together))
        wanted.append(flat(model))
    for seen in lab.run(replica(sgd, sync_every=1, **AVERAGING), in_process(3)):
        assert same(seen[:-1], wanted)


class Mixed(nn.Module):
    """Several dtypes, a tensor that is not contiguous, and buffers."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm1d(7)
        self.double = nn.Linear(9, 11, dtype=torch.float64)
        self.half = nn.Linear(17, 5, dtype=torch.bfloat16)


@pytest.mark.parametrize("fragments", [1, 3])
def test_the_exchange_makes_no_difference(lab, tmp_path, fragments):
    options = {"steps": 8, "sync_every": 3, "fragments": fragments}

    def make(rank):
        return lab.fill(Mixed())

    wanted = lab.train(make, in_process(3), **options)
    for each in (
        exchanges("threads", 3, chunk_bytes=128),
        exchanges("store", 3, tmp_path, chunk_bytes=128),
        exchanges("store", 3, chunk_bytes=1000),
    ):
        assert lab.identical([*lab.train(make, each, **options), *wanted])


def test_the_sum_is_taken_in_rank_order(lab, tmp_path):
    """On every shard, whoever owns it: values of many magnitudes, whose sum tells the order it was
    taken in.
    """
    generator = torch.Generator().manual_seed(0)
    moves = torch.randn(4, 400, generator=generator, dtype=torch.float64)
    moves *= 10.0 ** torch.randint(0, 12, moves.shape, generator=generator)

    def mean(order):
        total = moves[order[0]].clone()
        for rank in order[1:]:
            total += moves[rank]
        return total / 4

    def train(exchange):
        model = nn.ParameterList([torch.zeros(400, dtype=torch.float64)])
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        with DiLoCo(model, inner, exchange, sync_every=1, **AVERAGING):
            model[0].grad = -moves[exchange.rank]
            inner.step()
        return model[0].detach()

    wanted = mean(range(4))
    for order in itertools.permutations(range(4)):
        if order[2:] != (2, 3):  # 0 + 1 and 1 + 0 are the same
            shards = zip(mean(order).split(96), wanted.split(96), strict=True)
            assert not any(torch.equal(a, b) for a, b in shards), (
                "the values can tell the orders apart"
            )
    for each in (in_process(4), exchanges("store", 4, tmp_path)):
        for weight in lab.run(train, each):
            assert torch.equal(weight, wanted)

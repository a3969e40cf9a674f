"""What a sync does with buffers: a declared policy, and BatchNorm's statistics as the example."""

import pytest
import torch
from torch import nn

from diloco_core import ConfigurationError, DiLoCo, in_process
from diloco_core._fragments import Buffers, split

REPLICAS = 3


def model(lab):
    return lab.fill(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))


def train(lab, policy, steps=4, **options):
    """Real training on data of a mean of its own per replica; each one's values before and after the last sync."""

    def replica(exchange):
        net = model(lab)
        inner = torch.optim.SGD(net.parameters(), lr=0.01)
        generator = torch.Generator().manual_seed(exchange.rank)
        before = {}
        inner.register_step_post_hook(lambda *_: before.update(lab.values(net)))
        with DiLoCo(net, inner, exchange, **{"sync_every": steps, "buffers": policy, **options}):
            # Rank r sees r more batches per inner step than rank 0, as micro-batches: the counters differ.
            for _ in range(steps):
                for _ in range(1 + exchange.rank):
                    batch = torch.randn(8, 3, generator=generator) + exchange.rank
                    net(batch).square().mean().backward()
                inner.step()
                inner.zero_grad()
        return before, lab.values(net)

    return lab.run(replica, in_process(REPLICAS))


BUFFERS = [f"{layer}.{name}" for layer in (0, 2) for name in ("running_mean", "running_var")]
COUNTERS = ["0.num_batches_tracked", "2.num_batches_tracked"]


def test_mean(lab):
    runs = train(lab, "mean")
    assert lab.identical([after for _, after in runs])
    for name in BUFFERS:
        separate = torch.stack([before[name] for before, _ in runs])
        assert not torch.allclose(separate[0], separate[2])
        assert torch.allclose(runs[1][1][name], separate.mean(0), atol=1e-6)
    assert [runs[2][1][name].item() for name in COUNTERS] == [4, 4], "counters are those of rank 0"
    assert runs[2][0]["0.num_batches_tracked"].item() == 12


def test_rank0(lab):
    runs = train(lab, "rank0")
    assert lab.identical([after for _, after in runs])
    for name in BUFFERS + COUNTERS:
        assert torch.equal(runs[2][1][name], runs[0][0][name])


def test_none(lab):
    runs = train(lab, "none")
    for before, after in runs:
        for name in BUFFERS + COUNTERS:
            assert torch.equal(before[name], after[name])
    assert not torch.equal(runs[0][1]["0.running_mean"], runs[2][1]["0.running_mean"])
    assert torch.equal(runs[0][1]["1.weight"], runs[2][1]["1.weight"])


@pytest.mark.parametrize("policy", ["mean", "rank0"])
def test_buffers_take_no_outer_step(lab, policy):
    """Neither learning rate nor momentum touches them: they are the same whatever the outer optimizer."""
    gentle = train(lab, policy, outer_lr=0.01, outer_momentum=0.0)
    strong = train(lab, policy, outer_lr=1.0, outer_momentum=0.9)
    for name in BUFFERS + COUNTERS:
        assert torch.equal(gentle[0][1][name], strong[0][1][name])
    assert not torch.equal(gentle[0][1]["1.weight"], strong[0][1]["1.weight"])


def test_with_fragments_they_go_once_per_cycle_with_the_last(lab):
    def replica(exchange):
        net = model(lab)
        inner = torch.optim.SGD(net.parameters(), lr=0.01)
        seen = []
        with DiLoCo(net, inner, exchange, sync_every=2, fragments=2):
            for step in range(4):
                net[0].running_mean.fill_(10.0 * step + exchange.rank)
                lab.push(net, inner, exchange.rank, step)
                seen.append(net[0].running_mean[0].item())
        return seen

    runs = lab.run(replica, in_process(2))
    assert runs == [[0.0, 10.5, 20.0, 30.5], [1.0, 10.5, 21.0, 30.5]]


def test_the_first_rank_gives_the_initial_buffers(lab):
    def replica(exchange):
        net = model(lab)
        net[0].running_var.fill_(1.0 + exchange.rank)
        net[0].num_batches_tracked.fill_(5 - exchange.rank)
        inner = torch.optim.SGD(net.parameters(), lr=1.0)
        with DiLoCo(net, inner, exchange, sync_every=1):
            return lab.values(net)

    runs = lab.run(replica, in_process(REPLICAS))
    assert lab.identical(runs)
    assert runs[1]["0.running_var"].tolist() == [1.0, 1.0, 1.0]
    assert runs[2]["0.num_batches_tracked"].item() == 5


def test_booleans_and_small_integers_survive(lab):
    def replica(exchange):
        net = nn.Linear(2, 2)
        lab.fill(net)
        net.register_buffer("mask", torch.tensor([True, False, exchange.rank == 0]))
        net.register_buffer("table", torch.tensor([-7, exchange.rank, 127], dtype=torch.int8))
        net.register_buffer("big", torch.tensor(2**53 + 1 + exchange.rank))
        inner = torch.optim.SGD(net.parameters(), lr=1.0)
        with DiLoCo(net, inner, exchange, sync_every=1):
            lab.push(net, inner, exchange.rank, 0)
        return lab.values(net)

    runs = lab.run(replica, in_process(REPLICAS))
    assert lab.identical(runs)
    assert runs[2]["mask"].tolist() == [True, False, True]
    assert (runs[2]["table"].tolist(), runs[2]["table"].dtype) == ([-7, 0, 127], torch.int8)
    assert runs[2]["big"].item() == 2**53 + 1, "not by way of a float"


def test_buffers_that_are_not_saved_are_not_synced():
    net = nn.Linear(2, 2)
    net.register_buffer("cache", torch.ones(3), persistent=False)
    (part,) = split(net, 1, Buffers.MEAN)
    assert [named.name for named in part] == ["weight", "bias"]


def test_what_cannot_be_synced_is_refused():
    net = nn.Linear(1, 1)
    inner = torch.optim.SGD(net.parameters(), lr=1.0)
    with pytest.raises(ConfigurationError, match=r"buffers must be one of 'mean', 'rank0', 'none', not 'sum'"):
        DiLoCo(net, inner, in_process(1)[0], sync_every=1, buffers="sum")
    net.register_buffer("spectrum", torch.ones(2, dtype=torch.complex64))
    with pytest.raises(ConfigurationError, match="'spectrum' is complex"):
        DiLoCo(net, inner, in_process(1)[0], sync_every=1)
    assert DiLoCo(net, inner, in_process(1)[0], sync_every=1, buffers="none").committed == 0

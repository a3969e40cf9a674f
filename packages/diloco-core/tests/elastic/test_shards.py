"""Shards of an elastic run: a large model has several for every replica."""

import random

import pytest
import torch
from simulated import KINDS, Fault, Schedule, SimulatedTraining, flawless, simulate

from diloco_core import DiLoCo, Elastic, MismatchError, connect
from diloco_core._run._records._keys import MANIFEST
from diloco_core._run._records._manifest import Manifest

_SIZES = "diloco_core._arithmetic._layout"


@pytest.mark.parametrize(
    ("size", "shards"), [(0, 4), (4, 4), (2**28, 4), (2**28 + 1, 8), (28 * 10**9, 4 * 105)]
)
def test_no_shard_is_larger_than_the_limit(size, shards, tmp_path):
    """16 MiB, and four times as much in a folder."""
    folder = connect(str(tmp_path), rank=0, world_size=4, min_replicas=2)
    outcome = simulate(lambda node: node.exchange.shards(size), 4, Elastic(2, grace=5.0))
    (elsewhere,) = set(outcome.results.values())
    assert folder.shards(size) == shards
    assert size / shards <= 2**26
    assert shards <= elsewhere < 4 * shards + 4
    assert size / elsewhere <= 2**24
    folder.leave()


@pytest.mark.sampled
@pytest.mark.parametrize("topology", ["sharded", "gather"])
def test_with_several_shards_for_every_replica_whatever_goes_wrong(topology, monkeypatch):
    monkeypatch.setattr(f"{_SIZES}.SHARD_BYTES", 128)
    for number in range(8):
        chance = random.Random(number)
        faults = [
            Fault(
                chance.randrange(3), chance.randint(1, 2), chance.randint(10, 200),
                chance.choice(KINDS), 60.0,
            )
            for _ in range(6)
        ]  # fmt: skip
        training = SimulatedTraining(syncs=4, sizes=(400,))
        schedule = Schedule(3, seed=number, faults=faults, restart_after=2.0, latency=0.2)
        every = 2 if topology == "gather" else None
        elastic = Elastic(2, grace=8.0, topology=topology, publish_every=every)
        outcome = flawless(training, schedule, elastic, limit=5000.0)
        table = Manifest.from_json(outcome.store.objects[MANIFEST], "").fragments[0]
        assert table["shards"] == 15


@pytest.mark.parametrize("membership", [{}, {"min_replicas": 1}], ids=["fixed", "elastic"])
def test_a_run_that_was_begun_over_another_kind_of_store_is_refused(
    membership, tmp_path, monkeypatch
):
    def go(**options):
        model = torch.nn.Linear(64, 64)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        exchange = connect(tmp_path, rank=0, world_size=1, **membership, **options)
        with DiLoCo(model, inner, exchange, sync_every=1):
            model(torch.ones(64)).sum().backward()
            inner.step()

    monkeypatch.setattr(f"{_SIZES}._IN_A_FOLDER", 1)
    monkeypatch.setattr(f"{_SIZES}.SHARD_BYTES", 4096)
    go()
    monkeypatch.undo()
    with pytest.raises(MismatchError, match="in 5 shards, but rank 0 would cut it into 1"):
        go(resume=True)

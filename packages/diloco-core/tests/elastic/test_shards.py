"""Shards of an elastic run: small enough to be published in one piece, so a large model has several
for every replica.
"""

import random

import pytest
import torch
from simulated import KINDS, Fault, Schedule, SimulatedTraining, simulate, violations

from diloco_core import DiLoCo, Elastic, MismatchError, connect
from diloco_core._arithmetic import _shard_sizes
from diloco_core._run._records._keys import MANIFEST
from diloco_core._run._records._manifest import Manifest


@pytest.mark.parametrize(
    ("size", "shards"),
    [
        (0, 4),
        (4, 4),
        (4 * 2**26, 4),
        (4 * 2**26 + 1, 8),
        (28 * 10**9, 4 * 105),
        (280 * 10**9, 4 * 1044),
    ],
)
def test_no_shard_is_larger_than_the_limit(size, shards, exchange_of_four):
    assert exchange_of_four.shards(size) == shards
    assert size / shards <= 4 * _shard_sizes.SHARD_BYTES
    elsewhere = _shard_sizes.shards_of(size, 4)
    assert shards <= elsewhere < 4 * shards + 4
    assert size / elsewhere <= _shard_sizes.SHARD_BYTES


@pytest.fixture
def exchange_of_four(tmp_path):
    exchange = connect(str(tmp_path), rank=0, world_size=4, min_replicas=2)
    yield exchange
    exchange.leave()


@pytest.mark.parametrize("topology", ["sharded", "gather"])
def test_with_several_shards_for_every_replica_whatever_goes_wrong(topology, monkeypatch):
    monkeypatch.setattr(_shard_sizes, "SHARD_BYTES", 128)
    for number in range(12):
        chance = random.Random(number)
        faults = [
            Fault(
                chance.randrange(3),
                chance.randint(1, 2),
                chance.randint(10, 200),
                chance.choice(KINDS),
                60.0,
            )
            for _ in range(6)
        ]
        training = SimulatedTraining(syncs=4, sizes=(400,))
        schedule = Schedule(3, seed=number, faults=faults, restart_after=2.0, latency=0.2)
        elastic = Elastic(
            2, grace=8.0, topology=topology, publish_every=2 if topology == "gather" else None
        )
        outcome = simulate(training, schedule, elastic, limit=5000.0)
        assert violations(outcome, training) == []
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

    monkeypatch.setattr(_shard_sizes, "_IN_A_FOLDER", 1)
    monkeypatch.setattr(_shard_sizes, "SHARD_BYTES", 4096)
    go()
    monkeypatch.undo()
    with pytest.raises(MismatchError, match="in 5 shards, but rank 0 would cut it into 1"):
        go(resume=True)

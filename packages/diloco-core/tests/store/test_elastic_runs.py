"""Whole elastic runs over S3: the same bytes as over a local folder, and a store from which a run
can be gone on with.
"""

import pytest
import torch
from safetensors.torch import load_file

from diloco_core import DiLoCo, Elastic, StoreExchange, export
from diloco_core._store._open import open_store
from diloco_core.testing import run_replicas

REPLICAS = 3
SYNCS = 3


class Model(torch.nn.Linear):
    """With a buffer of each kind: rank 0's values are taken of both where buffers are rank 0's."""

    def __init__(self):
        super().__init__(60, 60)
        self.register_buffer("scale", torch.ones(500))
        self.register_buffer("counter", torch.zeros(500, dtype=torch.int64))

    def forward(self, x):
        self.scale.mul_(1.01)
        self.counter.add_(1)
        return super().forward(x) * self.scale[:60]


def train(exchange, syncs):
    """Train until so many outer steps are committed; the model's values at the end."""
    generator = torch.Generator().manual_seed(7)
    model = Model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
        model.scale.add_(exchange.rank)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with DiLoCo(model, inner, exchange, sync_every=1, buffers="rank0") as outer:
        while outer.committed < syncs:
            generator.manual_seed(100 * exchange.rank + outer.inner_steps)
            model(torch.randn(4, 60, generator=generator)).pow(2).mean().backward()
            inner.step()
            inner.zero_grad()
    return {name: value.clone() for name, value in model.state_dict().items()}


def run(stores, topology, syncs, *, resume=False):
    """What all replicas hold at the end."""
    every = 2 if topology == "gather" else None
    settings = Elastic(REPLICAS, topology=topology, publish_every=every, resume=resume)
    exchanges = [StoreExchange(store, r, REPLICAS, settings) for r, store in enumerate(stores)]
    results = run_replicas(lambda exchange: train(exchange, syncs), exchanges)
    assert not [result for result in results if isinstance(result, BaseException)], results
    for result in results[1:]:
        assert_equal(result, results[0])
    return results[0]


def assert_equal(values, expected):
    assert values.keys() == expected.keys()
    assert [name for name in values if not torch.equal(values[name], expected[name])] == []


@pytest.mark.parametrize("topology", ["sharded", "gather"])
def test_several_shards_of_every_member(
    small_s3, small_s3_drivers, remote, tmp_path, monkeypatch, topology
):
    """They are computed and uploaded at the same time; what the records say of them is what a
    resumed run believes.
    """
    monkeypatch.setattr("diloco_core._arithmetic._layout.SHARD_BYTES", 1024)
    for resume in (False, True):
        syncs = SYNCS + 2 * resume
        folders = [open_store(str(tmp_path / "run")) for _ in range(REPLICAS)]
        expected = run(folders, topology, syncs, resume=resume)
        stores = [remote(small_s3_drivers["obstore"]) for _ in range(REPLICAS)]
        found = run(stores, topology, syncs, resume=resume)
        assert_equal(found, expected)
        file = tmp_path / f"{resume}.safetensors"
        export("obstore+s3://bucket/run", file)
        assert_equal(load_file(file), found)
    keys = stores[0].list("state/")
    assert len({key.split(".")[1] for key in keys if not key.endswith("done.json")}) > 4 * REPLICAS

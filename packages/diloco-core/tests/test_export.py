"""A model comes out of the store alone, under its own names."""

import pytest
import torch
from safetensors.torch import load_file

from diloco_core import (
    ConfigurationError,
    CorruptedObjectError,
    DiLoCo,
    Elastic,
    ElasticExchange,
    RendezvousError,
    RunExistsError,
    export,
)
from diloco_core._store import open_store


class Net(torch.nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.first = torch.nn.Linear(6, 5, dtype=dtype)
        self.norm = torch.nn.BatchNorm1d(5)
        self.last = torch.nn.Linear(5, 2)

    def forward(self, x):
        return self.last(self.norm(self.first(x.to(self.first.weight.dtype)).float()))


def _run(lab, uri, topology="sharded", dtype=torch.float32, syncs=6, **options):
    def replica(exchange):
        torch.manual_seed(exchange.rank)
        net = lab.fill(Net(dtype))
        inner = torch.optim.SGD(net.parameters(), lr=0.1)
        with DiLoCo(net, inner, exchange, sync_every=2, fragments=2) as outer:
            while outer.committed < syncs:
                net(torch.randn(8, 6, generator=generators[exchange.rank])).pow(2).mean().backward()
                inner.step()
        return lab.values(net)

    generators = [torch.Generator().manual_seed(rank) for rank in range(3)]
    settings = Elastic(2, grace=20.0, topology=topology, publish_every=2, **options)
    return lab.run(replica, [ElasticExchange(open_store(uri), rank, 3, settings) for rank in range(3)])


@pytest.mark.parametrize("topology", ["sharded", "gather"])
def test_the_file_holds_what_the_replicas_hold(lab, tmp_path, topology):
    runs = _run(lab, str(tmp_path / "run"), topology)
    assert lab.identical(runs)
    target = tmp_path / "model.safetensors"
    assert export(str(tmp_path / "run"), target) >= 6
    found = load_file(target)
    assert found.keys() == runs[0].keys()
    assert all(torch.equal(found[name], runs[0][name]) for name in found)
    Net().load_state_dict(found)
    assert {path.name for path in tmp_path.iterdir()} == {"run", "model.safetensors"}


def test_dtypes_are_the_models_or_what_is_asked_for(lab, tmp_path):
    _run(lab, str(tmp_path / "run"), dtype=torch.bfloat16)
    export(str(tmp_path / "run"), tmp_path / "a")
    assert load_file(tmp_path / "a")["first.weight"].dtype is torch.bfloat16
    export(str(tmp_path / "run"), tmp_path / "b", dtype=torch.float32)
    found = load_file(tmp_path / "b")
    assert found["first.weight"].dtype is torch.float32
    assert found["norm.num_batches_tracked"].dtype is torch.int64
    with pytest.raises(ConfigurationError, match="floating-point"):
        export(str(tmp_path / "run"), tmp_path / "c", dtype=torch.int64)


def test_a_damaged_shard_is_no_model(lab, tmp_path):
    _run(lab, str(tmp_path / "run"))
    shard = sorted((tmp_path / "run" / "state").glob("*/*.safetensors"))[-1]
    data = bytearray(shard.read_bytes())
    data[-100 if len(data) > 900 else -10] ^= 1
    for position in range(len(data) // 2, len(data), 16):
        data[position] ^= 1
    shard.write_bytes(data)
    with pytest.raises(CorruptedObjectError):
        export(str(tmp_path / "run"), tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_no_run_and_a_strict_run_are_refused(lab, tmp_path):
    with pytest.raises(RendezvousError, match="holds no run"):
        export(str(tmp_path / "none"), tmp_path / "model")
    lab.train(lambda rank: lab.small_model(), lab.store_exchanges(tmp_path, 2))
    with pytest.raises(RunExistsError, match="strict run"):
        export(str(tmp_path / "run"), tmp_path / "model")

"""Elastic runs over real drivers, in real time."""

import threading

import pytest
import torch

from diloco_core import DiLoCo, Elastic, StoreExchange, export
from diloco_core._store._open import open_store
from diloco_core.testing import run_replicas


def _uri(kind, tmp_path):
    return str(tmp_path / "run") if kind == "folder" else f"memory://{tmp_path.name}/run"


def _replica(lab, syncs, crash_at=None, event=None):
    def crash():
        if event is None:
            raise KeyboardInterrupt
        event(threading.current_thread())

    def replica(exchange):
        net = lab.fill(torch.nn.Linear(20, 9))
        inner = torch.optim.SGD(net.parameters(), lr=0.1)
        with DiLoCo(net, inner, exchange, sync_every=2) as outer:
            while outer.committed < syncs:
                if exchange.rank == 1 and outer.committed == crash_at:
                    crash()
                lab.push(net, inner, exchange.rank, outer.inner_steps)
        return lab.values(net)

    return replica


def _exchanges(uri, settings, ranks=(0, 1, 2)):
    return [StoreExchange(open_store(uri), rank, 3, settings) for rank in ranks]


@pytest.mark.parametrize("kind", ["folder", "memory"])
@pytest.mark.parametrize("topology", ["sharded", "gather"])
def test_a_replica_dies_and_comes_back_to_the_same_bytes(lab, tmp_path, kind, topology):
    settings, uri = (
        Elastic(
            2, grace=20.0, topology=topology, publish_every=2 if topology == "gather" else None
        ),
        _uri(kind, tmp_path),
    )
    first = run_replicas(_replica(lab, 6, crash_at=3), _exchanges(uri, settings))
    assert lab.kinds(first) == [dict, KeyboardInterrupt, dict]
    (back,) = run_replicas(_replica(lab, 6), _exchanges(uri, settings, [1]))
    assert lab.identical([first[0], first[2], back])
    export(uri, tmp_path / "model.safetensors")

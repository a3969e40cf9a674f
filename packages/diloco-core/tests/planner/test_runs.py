"""Test what a run makes of its own plan: the topology, and a warning about syncs that are long."""

import json
from functools import partial

import pytest
import torch

from diloco_core import DiLoCo, Elastic, StoreExchange, Timing, Transfer, plan_exchange
from diloco_core._store._open import open_store

MIB = 2**20
NIC = 1.25e9
"""What a network card of 10 Gb/s moves, in bytes per second."""
SMALL = Transfer(16, 4 * MIB, 10 * MIB)
LARGE = Transfer(64, 8 * MIB, 512 * MIB)
ADAM = {"outer_optimizer": partial(torch.optim.Adam, lr=0.1)}


@pytest.fixture
def far(tmp_path):
    """A store that passes for one behind a network."""
    store = open_store(f"memory://planned{tmp_path}")
    store.near = False
    return store


def entered(
    store, params, replicas, timing=None, rank=0, fragments=(1.0,), elastic=None, **options
):
    """Enter a run as one of its replicas; what its manifest says."""
    exchange = StoreExchange(store, rank, replicas, elastic, timing=timing or Timing())
    parts = [torch.zeros(int(params * share)) for share in fragments]
    model = torch.nn.ParameterList(parts)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    options |= {"fragments": len(fragments), "sync_every": 2 * len(fragments)}
    with DiLoCo(model, inner, exchange, flush="none", **options):
        return json.loads(store.get("manifest.json"))


class TestTopology:
    @pytest.mark.sampled
    @pytest.mark.parametrize(
        ("params", "replicas", "topology", "transfer", "outer"),
        [
            (1e6, 8, "gather", None, 1.0),
            (1e6, 8, "sharded", SMALL, 1.0),
            (3e6, 8, "sharded", None, 1.0),
            (3e6, 8, "gather", None, 2.0),
            (3e6, 8, "gather", LARGE, 1.0),
        ],
    )
    def test_a_run_chooses_the_planned_one(self, far, params, replicas, topology, transfer, outer):
        """With its way to read and write, and what its outer optimizer keeps."""
        plan = plan_exchange(params, replicas, NIC, transfer=transfer, outer_state=outer)
        assert plan.topology == topology
        far.background.settings = transfer or Transfer()
        manifest = entered(
            far, params, replicas, elastic=Elastic(1), **(ADAM if outer == 2 else {})
        )
        assert manifest["topology"] == topology

    def test_what_is_asked_for_wins_and_folders_are_sharded(self, far, tmp_path):
        near = open_store(str(tmp_path))
        assert entered(near, 100, 4, elastic=Elastic(1))["topology"] == "sharded"
        asked = Elastic(1, topology="sharded")
        assert entered(far, 100, 4, elastic=asked)["topology"] == "sharded"

"""What a run makes of its own plan: the topology, and a warning about syncs that are long."""

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
    @pytest.mark.parametrize(
        ("params", "replicas", "topology"),
        [
            (1e6, 1, "gather"),
            (1e6, 4, "gather"),
            (8e6, 4, "gather"),
            (1e8, 4, "sharded"),
            (1e8, 8, "sharded"),
            (1e9, 4, "sharded"),
            (1e7, 64, "sharded"),
        ],
    )
    def test_the_quicker_one_is_planned(self, params, replicas, topology):
        assert plan_exchange(params, replicas, NIC).topology == topology

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
        far.transfer = transfer or Transfer()
        manifest = entered(
            far, params, replicas, elastic=Elastic(1), **(ADAM if outer == 2 else {})
        )
        assert manifest["topology"] == topology

    def test_what_is_asked_for_wins_and_folders_are_sharded(self, far, tmp_path):
        near = open_store(str(tmp_path))
        assert entered(near, 100, 4, elastic=Elastic(1))["topology"] == "sharded"
        asked = Elastic(1, topology="sharded")
        assert entered(far, 100, 4, elastic=asked)["topology"] == "sharded"


class TestWarning:
    """Given where a slow replica could make the others give up a sync."""

    @pytest.mark.parametrize(
        ("elastic", "options", "planned"),
        [
            (None, {}, {"fixed": True}),
            (None, ADAM, {"fixed": True, "outer_state": 2.0}),
            ({"topology": "sharded"}, {"outer_momentum": 0.0}, {"outer_state": 0.0}),
            ({"topology": "sharded"}, {"codec": "int8"}, {"codec": "int8"}),
            ({"topology": "sharded"}, {"state_codec": "int8"}, {"state_codec": "int8"}),
            ({"topology": "gather", "publish_every": 3}, {}, {"publish_every": 3}),
        ],
    )
    def test_has_the_figures_of_the_runs_own_plan(self, far, caplog, elastic, options, planned):
        replicas = 1 if elastic is None else 8
        topology = (elastic or {}).get("topology", "sharded")
        plan = plan_exchange(4e5, replicas, NIC, topology=topology, **planned)
        settings = elastic and Elastic(1, grace=0.005, **elastic)
        state = torch.random.get_rng_state()
        timing = Timing(sync_timeout=0.01)
        entered(far, 4e5, replicas, timing, replicas - 1, elastic=settings, **options)
        assert torch.equal(torch.random.get_rng_state(), state)
        (text,) = [r.getMessage() for r in caplog.records if "sync_timeout" in r.getMessage()]
        requests = plan.gets + plan.puts + plan.lists + plan.deletes
        for figure in (
            f"rank {replicas - 1}: a sync of 0.0016 GB between {replicas} replicas",
            f"takes about {plan.seconds:.3g} s. The longest part",
            f"takes {plan.longest_part:.3g} s. The others",
            "sync_timeout (0.01 s)",
            f"sends {plan.bytes_sent / 1e9:.3g} GB",
            f"receives {plan.bytes_received / 1e9:.3g} GB with {requests:.0f} requests",
        ):
            assert figure in text

    @pytest.mark.parametrize(
        ("params", "topology", "transfer", "told"),
        [
            (1e5, "sharded", None, "The rate of requests below the"),
            (1e7, "gather", None, "is quicker, 'sharded'"),
            (1e7, "gather", LARGE, "The rate of requests below the"),
        ],
    )
    def test_says_what_helps(self, far, caplog, params, topology, transfer, told):
        far.transfer, elastic = transfer or Transfer(), Elastic(1, grace=0.5, topology=topology)
        plan = plan_exchange(params, 64, NIC, topology=topology, transfer=transfer)
        assert told in plan.limits[0]
        entered(far, params, 64, Timing(sync_timeout=0.6), elastic=elastic)
        assert " ".join(plan.limits) in caplog.text
        assert "more fragments" not in caplog.text

    def test_is_about_the_largest_fragment(self, far, caplog):
        entered(far, 4000, 1, Timing(sync_timeout=0.01), fragments=(0.25, 0.75))
        assert "a sync of 1.2e-05 GB between 1 replicas" in caplog.text
        assert "more fragments" in caplog.text

    def test_is_not_given_where_there_is_nothing_to_say(self, far, caplog, tmp_path):
        plan = plan_exchange(4e5, 1, NIC, fixed=True)
        assert plan.longest_part < plan.seconds
        timing = Timing(sync_timeout=(plan.longest_part + plan.seconds) / 2)
        entered(far, 4e5, 1, timing)
        entered(open_store(str(tmp_path)), 4e5, 1, Timing(sync_timeout=0.01))
        assert "sync_timeout" not in caplog.text

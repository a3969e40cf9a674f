"""The topology that a run gets where it is left to the planner."""

from functools import partial

import pytest
import torch

from diloco_core import (
    DiLoCo,
    Elastic,
    StoreExchange,
    Transfer,
    plan_exchange,
)
from diloco_core._run._settings import choose_topology
from diloco_core._store._open import open_store

MIB = 2**20

NIC = 1.25e9
"""What a network card of 10 Gb/s moves, in bytes per second."""


class TestTheChoiceOfARun:
    """``topology="auto"`` is chosen by whoever begins the run, with what it was given."""

    @pytest.mark.parametrize(
        "transfer", [None, Transfer(16, 4 * MIB, 10 * MIB), Transfer(64, 8 * MIB, 512 * MIB)]
    )
    def test_by_its_way_to_read_and_write(self, transfer):
        for params in (1e5, 1e6, 3e6, 1e7, 3e7):
            for replicas in (2, 4, 8, 16):
                chosen = choose_topology(
                    "auto",
                    state_bytes=int(4 * params),
                    world_size=replicas,
                    publish_every=4,
                    near=False,
                    transfer=transfer,
                    outer_state=2.0,
                )
                assert (
                    chosen
                    == plan_exchange(
                        params, replicas, NIC, transfer=transfer, outer_state=2.0
                    ).topology
                )

    def test_it_makes_a_difference(self):
        """Otherwise the test above would not notice if one of the two were left out."""
        options = {"state_bytes": 32_000_000, "world_size": 4, "publish_every": 4, "near": False}
        small = Transfer(16, 4 * MIB, 10 * MIB)
        assert choose_topology("auto", **options) != choose_topology(
            "auto", **options, transfer=small
        )

    def test_what_is_handed_on(self, tmp_path, monkeypatch):
        asked = []
        monkeypatch.setattr(
            "diloco_core._run._start.choose_topology",
            lambda *_, **named: asked.append(named) or "sharded",
        )
        store = open_store("memory://chosen")
        store.transfer = Transfer(7)
        exchange = StoreExchange(store, 0, 1, Elastic(1))
        model = torch.nn.ParameterList([torch.ones(1000)])
        adam = partial(torch.optim.Adam, lr=0.1)
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        with DiLoCo(model, inner, exchange, sync_every=2, outer_optimizer=adam):
            pass
        ((named),) = asked
        assert (named["transfer"], named["outer_state"]) == (Transfer(7), 2)


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
def test_the_topology_that_a_run_chooses(params, replicas, topology):
    def choose(asked, near):
        return choose_topology(
            asked, state_bytes=int(4 * params), world_size=replicas, publish_every=4, near=near
        )

    assert choose("auto", near=False) == topology
    assert choose("auto", near=True) == "sharded"
    assert (choose("gather", near=True), choose("sharded", near=False)) == ("gather", "sharded")

"""The warning about syncs that are long for the time that replicas wait for each other."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from diloco_core import (
    DiLoCo,
    Elastic,
    StoreExchange,
    Timing,
    Transfer,
    plan_exchange,
)
from diloco_core._planner._warning import warn_of_long_syncs
from diloco_core._store._open import open_store

MIB = 2**20

NIC = 1.25e9
"""What a network card of 10 Gb/s moves, in bytes per second."""


class Far:
    """A folder that passes for a store behind a network."""

    near = False

    def __init__(self, path):
        self._store = open_store(str(path))

    def __getattr__(self, name):
        return getattr(self._store, name)


FAR = SimpleNamespace(near=False)


class TestWarned:
    """Of a run whose syncs take longer than they may."""

    def test_with_the_figures(self, caplog):
        warn_of_long_syncs(28 * 10**9, rank=3, replicas=8, store=FAR, sync_timeout=20.0, fixed=True)
        plan = plan_exchange(7e9, 8, NIC, fixed=True)
        (record,) = caplog.records
        assert record.levelname == "WARNING"
        text = record.getMessage()
        requests = plan.gets + plan.puts + plan.lists + plan.deletes
        for figure in (
            "rank 3",
            "28 GB between 8 replicas",
            f"takes about {plan.seconds:.3g} s. The longest part",
            f"takes {plan.longest_part:.3g} s. The others",
            "sync_timeout (20 s)",
            f"sends {plan.bytes_sent / 1e9:.3g} GB",
            f"receives {plan.bytes_received / 1e9:.3g} GB with {requests:.0f} requests",
            "fragments",
        ):
            assert figure in text

    def test_where_the_prefix_is_what_holds_it_up_that_is_said(self, caplog):
        warn_of_long_syncs(
            4 * 10**6, rank=0, replicas=1000, store=FAR, sync_timeout=60.0, fixed=True
        )
        assert "The rate of requests below the prefix" in caplog.text
        assert "more fragments" not in caplog.text

    @pytest.mark.parametrize(
        ("size", "options"),
        [
            (28 * 10**9, {"sync_timeout": 1800.0}),
            (28 * 10**9, {"store": SimpleNamespace(near=True)}),
            (0, {}),
            (10**6, {}),
            (4 * 10**8, {"sync_timeout": 1.5}),
        ],
        ids=["enough time", "folder", "nothing", "small", "enough for each part"],
    )
    def test_not_where_there_is_nothing_to_say(self, caplog, size, options):
        options = {"store": FAR, "sync_timeout": 60.0, **options}
        warn_of_long_syncs(size, rank=0, replicas=8, fixed=True, **options)
        assert caplog.records == []

    def test_enough_for_each_part_is_less_than_for_all_of_it(self):
        """The last case above: this is how it comes that such a run ends well."""
        plan = plan_exchange(1e8, 8, NIC, fixed=True)
        assert plan.longest_part < 1.5 < plan.seconds

    def test_what_the_outer_optimizer_keeps_is_published_too(self, caplog):
        options = {"rank": 0, "replicas": 4, "store": FAR, "fixed": False}
        plans = [
            plan_exchange(1e8, 4, NIC, topology="sharded", outer_state=kept) for kept in (1.0, 2.0)
        ]
        timeout = (plans[0].longest_part + plans[1].longest_part) / 2
        warn_of_long_syncs(4 * 10**8, sync_timeout=timeout, **options)
        assert caplog.records == []
        warn_of_long_syncs(4 * 10**8, sync_timeout=timeout, outer_state=lambda: 2.0, **options)
        assert len(caplog.records) == 1

    def test_of_the_topology_that_the_run_has(self, caplog):
        options = {"rank": 0, "replicas": 64, "store": FAR, "sync_timeout": 60.0, "fixed": False}
        warn_of_long_syncs(4 * 10**8, topology="sharded", **options)
        assert caplog.records == []
        warn_of_long_syncs(4 * 10**8, topology="gather", publish_every=4, **options)
        assert "'sharded'" in caplog.text

    @pytest.mark.parametrize("fixed", [True, False])
    @pytest.mark.parametrize(
        ("store", "warnings"), [(Far, 1), (open_store, 0)], ids=["far", "folder"]
    )
    def test_when_a_run_is_entered(self, lab, tmp_path, caplog, fixed, store, warnings):
        """One replica waits for no other, so the limit may be as short as it wants to be."""
        timing = Timing(sync_timeout=0.01)
        found = store(tmp_path if store is Far else str(tmp_path))
        if fixed:
            exchange = StoreExchange(found, 0, 1, timing=timing)
        else:
            exchange = StoreExchange(found, 0, 1, Elastic(1, grace=0.005), timing=timing)
        model = torch.nn.ParameterList([torch.ones(1000), torch.ones(3000)])
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        with DiLoCo(model, inner, exchange, sync_every=2, fragments=2):
            said = [
                record.getMessage()
                for record in caplog.records
                if "sync_timeout" in record.getMessage()
            ]
            assert len(said) == warnings
            assert all("a sync of 1.2e-05 GB between 1 replicas" in text for text in said), (
                "of the larger fragment"
            )
            lab.push(model, inner, 0, 0)

    def test_it_is_the_run_s_own_plan_that_counts(self, tmp_path, monkeypatch):
        """Of the topology, the replicas and the limits that the run has."""
        asked = []
        monkeypatch.setattr(
            "diloco_core._run._exchange.warn_of_long_syncs",
            lambda *a, **named: asked.append((a, named)),
        )
        store = open_store(str(tmp_path))
        elastic = Elastic(1, grace=1.0, topology="gather", publish_every=3)
        exchange = StoreExchange(store, 0, 1, elastic, timing=Timing(sync_timeout=77.0))
        model = torch.nn.ParameterList([torch.ones(1000)])
        with DiLoCo(model, torch.optim.SGD(model.parameters(), lr=1.0), exchange, sync_every=2):
            pass
        (((size,), named),) = asked
        assert size == 4000
        assert named.pop("outer_state")() == 1
        terms = named.pop("terms")
        assert (terms.codec.plain, terms.coding) == (True, None)
        expected = {
            "rank": 0,
            "replicas": 1,
            "sync_timeout": 77.0,
            "fixed": False,
            "topology": "gather",
            "publish_every": 3,
        }
        assert named == {**expected, "store": store}

    @pytest.mark.parametrize(
        ("outer", "kept"),
        [
            ({"outer_momentum": 0.0}, 0),
            ({}, 1),
            ({"outer_optimizer": partial(torch.optim.Adam, lr=0.1)}, 2),
            ({"outer_optimizer": partial(torch.optim.Adam, lr=0.1, amsgrad=True)}, 3),
        ],
        ids=["plain", "momentum", "Adam", "amsgrad"],
    )
    @pytest.mark.parametrize("fixed", [True, False])
    def test_a_run_knows_what_its_outer_optimizer_keeps(
        self, tmp_path, monkeypatch, outer, kept, fixed
    ):
        planned = []

        def plan(*args, **named):
            planned.append((named["fixed"], named["outer_state"]))
            return plan_exchange(*args, **named)

        monkeypatch.setattr("diloco_core._planner._warning.plan_exchange", plan)
        store = open_store(str(tmp_path))
        store.near = False  # syncs over folders are not planned
        exchange = StoreExchange(store, 0, 1) if fixed else StoreExchange(store, 0, 1, Elastic(1))
        model = torch.nn.ParameterList([torch.ones(1000)])
        state = torch.random.get_rng_state()
        with DiLoCo(
            model, torch.optim.SGD(model.parameters(), lr=1.0), exchange, sync_every=2, **outer
        ):
            assert planned == [(fixed, kept)]
        assert torch.equal(torch.random.get_rng_state(), state)

    def test_settings_of_the_store_are_taken_into_account(self, caplog):
        """With larger blocks a prefix that takes few requests is no hindrance."""
        options = {"rank": 0, "replicas": 256, "sync_timeout": 5.0, "fixed": True}
        store = open_store("memory://planned")
        store.near = False
        warn_of_long_syncs(4 * 10**9, store=store, **options)
        (record,) = caplog.records
        assert "block_bytes" in record.getMessage()
        caplog.clear()
        store.transfer = Transfer(block_bytes=16 * MIB, budget_bytes=512 * MIB, connections=64)
        warn_of_long_syncs(4 * 10**9, store=store, **options)
        (record,) = caplog.records
        assert "block_bytes" not in record.getMessage()

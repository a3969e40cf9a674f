"""What the planner says before anything is run; ``integration-tests/test_planned.py`` compares it with what is counted."""

import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_core import (
    ConfigurationError,
    DiLoCo,
    Elastic,
    ElasticExchange,
    ObjectStoreExchange,
    StoreModel,
    Timing,
    Transfer,
    plan_exchange,
)
from diloco_core._arithmetic._elastic_sizes import SHARD_BYTES
from diloco_core._elastic._settings import choose_topology
from diloco_core._planner._warning import warn_of_long_syncs
from diloco_core._store._open import open_store
from diloco_core._store._transfer import BLOCK_BYTES, PART_BYTES

MIB = 2**20

NIC = 1.25e9
"""What a network card of 10 Gb/s moves, in bytes per second."""
UNLIMITED = StoreModel(reads=None, writes=None)
unhurried = settings(deadline=None, max_examples=40)  # load is no failure


def sharded(params, replicas, **options):
    return plan_exchange(params, replicas, NIC, topology="sharded", **options)


class TestByHand:
    """Small cases that can be computed on paper."""

    STORE = StoreModel(1e8, first_byte=0.01, put=0.02, poll=0.5, reads=None, writes=None, put_price=1, get_price=0.1)

    def test_a_strict_sync_of_two(self):
        """A contribution of 1 MB for the other one, and a published shard of 2 MB, with some header each."""
        plan = plan_exchange(5e5, 2, NIC, strict=True, store=self.STORE)
        assert (plan.gets, plan.lists, plan.deletes) == (1 + 1 + 1, 2, 1)
        beats = plan.seconds / 10
        assert plan.puts == pytest.approx(1 + 1 + 1 + beats)
        up, record, seen, removed = 0.02 + 1e6 / 1e8, 0.02, 0.5 + 0.01 + 0.01, 0.02
        reduced, published, adopted = 0.01 + 1e6 / 1e8, 0.02 + 2e6 / 1e8, 0.5 + 0.01 + 0.01 + 1e6 / 1e8
        assert plan.seconds == pytest.approx(up + record + seen + removed + reduced + published + adopted, rel=1e-3)
        assert plan.cost == pytest.approx(2 * (plan.puts + plan.lists + 0.1 * plan.gets))
        assert plan.memory_bytes == 2e6 + 2e6 + 1e6
        assert plan.limits == ()

    def test_large_objects_go_up_in_parts_and_come_down_in_ranges(self):
        plan = plan_exchange(4 * PART_BYTES, 2, NIC, strict=True, store=self.STORE)
        parts = math.ceil((8 * PART_BYTES + 1) / PART_BYTES), math.ceil((16 * PART_BYTES + 1) / PART_BYTES)
        beats = plan.seconds / 10
        assert plan.puts == pytest.approx(sum(parts) + 2 * 2 + 1 + beats), "each with a beginning and an end"
        blocks = 8 * PART_BYTES / BLOCK_BYTES
        # The checksums of the contribution come first; those of a shard lie behind its last whole block.
        assert plan.gets == 1 + (blocks + 1) + (blocks + 1)

    @pytest.mark.parametrize(("kind", "found"), [("GET", 4e-7), ("PUT", 5e-6)])
    def test_who_pays_for_what(self, kind, found):
        prices = {"put_price": 5e-6 * (kind == "PUT"), "get_price": 4e-7 * (kind == "GET")}
        plan = sharded(1e9, 64, store=StoreModel(**prices))
        count = plan.gets if kind == "GET" else plan.puts + plan.lists
        assert plan.cost == pytest.approx(64 * count * found)

    def test_narrower_formats_move_fewer_bytes(self):
        seconds = [sharded(7e9, 64, bytes_per_param=width, store=UNLIMITED).seconds for width in (4, 2, 1)]
        assert seconds[1:] == pytest.approx([seconds[0] / 2, seconds[0] / 4], rel=0.1)


class TestTransfer:
    """What a replica may set."""

    def test_more_connections_are_quicker(self):
        fast = Transfer(connections=64, budget_bytes=512 * MIB)
        for topology in ("sharded", "gather"):
            plans = [plan_exchange(1e8, 8, 1e11, topology=topology, store=UNLIMITED, transfer=t) for t in (None, fast)]
            assert plans[1].seconds < 0.7 * plans[0].seconds
            assert (plans[1].gets, plans[1].puts) == (plans[0].gets, plans[0].puts)

    @pytest.mark.parametrize(("topology", "strict"), [("sharded", True), ("sharded", False), ("gather", False)])
    def test_larger_blocks_are_fewer_requests(self, topology, strict):
        plans = [
            plan_exchange(1e9, 4, NIC, topology=topology, strict=strict, transfer=t)
            for t in (Transfer(), Transfer(block_bytes=32 * MIB))
        ]
        assert plans[1].gets < 0.6 * plans[0].gets
        assert plans[1].bytes_received == plans[0].bytes_received


class TestTheRateOfAPrefix:
    def test_it_takes_as_long_as_the_prefix_needs(self):
        """1,000 replicas that each read all of 1,000 shards, once as contributions and once as published."""
        plan = plan_exchange(1e6, 1000, NIC, strict=True)
        assert plan.seconds > 1000 * plan.gets / 5500 > 300
        assert plan_exchange(1e6, 1000, NIC, strict=True, store=UNLIMITED).seconds < 10

    def test_writes_have_a_rate_of_their_own(self):
        slow, fast = (sharded(1e8, 64, store=StoreModel(reads=None, writes=rate)).seconds for rate in (10.0, 1e6))
        plan = sharded(1e8, 64)
        assert slow > fast + 64 * (plan.puts - 2) / 10

    def test_what_is_said_where_it_holds_a_sync_up(self):
        plan = plan_exchange(1e6, 1000, NIC, strict=True)
        free = plan_exchange(1e6, 1000, NIC, strict=True, store=UNLIMITED)
        first, helps, shards = plan.limits
        assert f"{plan.seconds:.3g} s" in first
        assert f"{free.seconds:.3g} s" in first
        assert f"{1000 * (plan.gets + plan.lists):,.0f} reads" in first
        assert f"{1000 * (plan.puts + plan.deletes):,.0f} writes" in first
        assert "5,500 and 3,500 per second" in first
        assert "sync_every" in helps
        assert "31 shards" in shards, "the square root of the number of replicas"
        assert free.limits == ()

    def test_nothing_is_said_of_shards_that_are_large_or_few(self):
        assert len(sharded(1e8, 100, store=StoreModel(reads=500.0)).limits) == 2, "few"
        assert not any(
            "cannot be chosen" in text for text in sharded(1e11, 200, store=StoreModel(reads=50.0)).limits
        ), "large"
        assert len(sharded(1e8, 200, store=StoreModel(reads=500.0)).limits) == 3

    def test_many_megabytes_have_as_many_shards_of_four(self):
        (*_, shards) = sharded(1e8, 1000).limits
        assert f"{math.ceil(4e8 / (4 * MIB))} shards" in shards

    def test_large_ranges_are_named_where_they_help(self):
        (*_, ranges) = plan_exchange(1e9, 64, NIC, strict=True, store=StoreModel(reads=500.0)).limits
        assert "block_bytes" in ranges
        assert f"a shard has {4e9 / 64 / 1e6:.3g} MB" in ranges
        large = Transfer(block_bytes=64 * MIB, budget_bytes=512 * MIB)
        plan = plan_exchange(1e9, 64, NIC, strict=True, store=StoreModel(reads=500.0), transfer=large)
        assert not any("block_bytes" in text for text in plan.limits)
        assert plan.seconds < plan_exchange(1e9, 64, NIC, strict=True, store=StoreModel(reads=500.0)).seconds / 4

    @pytest.mark.parametrize("options", [{"strict": True}, {"topology": "sharded"}])
    def test_writes_of_large_models_are_named(self, options):
        _, _, writes, ranges = plan_exchange(1e9, 256, NIC, **options).limits
        assert "parts of uploads" in writes
        assert "block_bytes" in ranges
        large = Transfer(64, 32 * MIB, 512 * MIB)
        limits = plan_exchange(1e9, 64, NIC, store=StoreModel(writes=500.0), transfer=large, **options).limits
        assert "parts of uploads" in limits[-1]
        assert not any("block_bytes" in text for text in limits), "reads are not what holds it up"
        assert not any("parts of uploads" in text for text in plan_exchange(1e6, 1000, NIC, **options).limits)

    def test_nothing_is_said_of_shards_where_everybody_reads_everything(self):
        plan = plan_exchange(1e5, 200, NIC, topology="gather", store=StoreModel(reads=100.0))
        assert len(plan.limits) == 2

    def test_a_quicker_topology_is_named(self):
        gather = plan_exchange(1e8, 64, NIC, topology="gather")
        assert f"'sharded': such a sync takes {sharded(1e8, 64).seconds:.3g} s" in gather.limits[-1]
        assert not any("topology" in text for text in sharded(1e8, 64).limits)

    def test_objects_that_no_store_takes_are_named(self):
        """``connect`` refuses such a run, and the plan of one of its fragments is what is wanted."""
        for options in ({"strict": True}, {"topology": "sharded"}, {"topology": "gather"}):
            limits = plan_exchange(20e9, 4, NIC, store=UNLIMITED, **options).limits
            assert "contributions of 80 GB are too large for an object, which can have 52 GB" in limits[0]
            assert "into 2 fragments or more" in limits[0]
        assert plan_exchange(10e9, 4, NIC, strict=True, store=UNLIMITED).limits == ()


class TestTheLongestPart:
    """Between two moments at which all wait for each other."""

    def test_by_hand(self):
        store = StoreModel(1e8, first_byte=0.01, put=0.02, poll=0.5, reads=None, writes=None)
        plan = plan_exchange(5e5, 2, NIC, strict=True, store=store)
        seen, removed, reduced, published = 0.01 + 0.02 + 0.01, 0.02, 0.01 + 1e6 / 1e8, 0.02 + 2e6 / 1e8
        assert plan.longest_part == pytest.approx(seen + removed + reduced + published, rel=1e-2)

    @pytest.mark.parametrize("options", [{"strict": True}, {"topology": "sharded"}, {"topology": "gather"}])
    def test_parts_are_shorter_than_the_whole(self, options):
        for params in (1e6, 1e8):
            plan = plan_exchange(params, 16, NIC, **options)
            assert plan.seconds / 4 < plan.longest_part < plan.seconds


class TestTheChoiceOfARun:
    """``topology="auto"`` is chosen by whoever begins the run, with what it was given."""

    @pytest.mark.parametrize("transfer", [None, Transfer(16, 4 * MIB, 10 * MIB), Transfer(64, 8 * MIB, 512 * MIB)])
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
                assert chosen == plan_exchange(params, replicas, NIC, transfer=transfer, outer_state=2.0).topology

    def test_it_makes_a_difference(self):
        """Otherwise the test above would not notice if one of the two were left out."""
        options = {"state_bytes": 32_000_000, "world_size": 4, "publish_every": 4, "near": False}
        small = Transfer(16, 4 * MIB, 10 * MIB)
        assert choose_topology("auto", **options) != choose_topology("auto", **options, transfer=small)

    def test_what_is_handed_on(self, tmp_path, monkeypatch):
        asked = []
        monkeypatch.setattr(
            "diloco_core._elastic._start.choose_topology", lambda *_, **named: asked.append(named) or "sharded"
        )
        store = open_store("memory://chosen")
        store.transfer = Transfer(7)
        exchange = ElasticExchange(store, 0, 1, Elastic(1))
        model = torch.nn.ParameterList([torch.ones(1000)])
        adam = partial(torch.optim.Adam, lr=0.1)
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        with DiLoCo(model, inner, exchange, sync_every=2, outer_optimizer=adam):
            pass
        ((named),) = asked
        assert (named["transfer"], named["outer_state"]) == (Transfer(7), 2)


def test_auto_is_the_quicker_one():
    for params in (1e6, 1e7, 1e8):
        for replicas in (2, 4, 16, 64):
            plans = {name: plan_exchange(params, replicas, NIC, topology=name) for name in ("sharded", "gather")}
            chosen = plan_exchange(params, replicas, NIC)
            assert chosen == plans[chosen.topology]
            assert chosen.seconds == min(plan.seconds for plan in plans.values())


@unhurried
@given(st.floats(1e3, 1e12), st.integers(2, 2000), st.floats(1e6, 1e11))
def test_bytes_stay_flat_in_the_sharded_topology(params, replicas, bandwidth):
    plan = plan_exchange(params, replicas, bandwidth, topology="sharded")
    delta = 4 * params
    headers = 512 * (1 + delta / SHARD_BYTES + replicas)
    assert delta * (1 + 2 / replicas) <= plan.bytes_sent <= delta * (1 + 2 / replicas) + 4 * headers
    values = 2 * delta * (replicas - 1) / replicas
    assert values <= plan.bytes_received <= values + headers
    assert plan.seconds >= (plan.bytes_sent - plan.bytes_received) / bandwidth * 0.999
    assert plan.seconds >= plan.bytes_received / bandwidth * 0.999
    assert 0 < plan.blocked(60.0) < 1


@unhurried
@given(st.floats(1e3, 1e12), st.integers(1, 500), st.floats(1e6, 1e11), st.floats(1.0, 100.0))
def test_more_bandwidth_is_never_slower(params, replicas, bandwidth, factor):
    for topology in ("gather", "sharded"):
        slow, fast = (plan_exchange(params, replicas, b, topology=topology) for b in (bandwidth, bandwidth * factor))
        assert fast.seconds <= slow.seconds


@pytest.mark.parametrize("strict", [True, False])
def test_alone_there_is_nothing_to_fetch(strict):
    plan = plan_exchange(1e6, 1, 1e9, strict=strict)
    assert plan.bytes_received == 0
    assert plan.gets <= 6, "records"


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
        return choose_topology(asked, state_bytes=int(4 * params), world_size=replicas, publish_every=4, near=near)

    assert choose("auto", near=False) == topology
    assert choose("auto", near=True) == "sharded"
    assert (choose("gather", near=True), choose("sharded", near=False)) == ("gather", "sharded")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ((0, 2, 1e9), "params"),
        ((1e6, 0, 1e9), "replicas"),
        ((1e6, 2.5, 1e9), "replicas"),
        ((1e6, 2, -1), "bandwidth"),
        ((1e6, 2, math.inf), "bandwidth"),
        ((1e6, 2, "fast"), "bandwidth"),
    ],
)
def test_impossible_arguments(arguments, word):
    with pytest.raises(ConfigurationError, match=word):
        plan_exchange(*arguments)


class Counting:
    """A store that counts payload bytes."""

    def __init__(self, store):
        self._store = store
        self.sent = self.received = 0

    def __getattr__(self, name):
        return getattr(self._store, name)

    def put(self, key, parts):
        size = self._store.put(key, parts)
        self.sent += size * key.endswith(".safetensors")
        return size

    def create(self, key, data):
        if isinstance(data, bytes):
            return self._store.create(key, data)
        parts = [bytes(part) for part in data]
        created = self._store.create(key, parts)
        self.sent += sum(map(len, parts)) * created
        return created

    def open(self, key, size=None):
        reader = self._store.open(key, size)
        read_into = reader.read_into

        def counted(offset, buffer):
            self.received += len(buffer)
            read_into(offset, buffer)

        reader.read_into = counted
        return reader


class TestCounted:
    """What is planned and what is reported is what a store sees."""

    @pytest.mark.parametrize("kind", ["strict", "sharded", "gather"])
    @pytest.mark.parametrize(
        ("replicas", "optimizer", "outer_state"),
        [(n, "momentum", 1.0) for n in (1, 2, 8)] + [(3, "plain", 0.0), (3, "Adam", 2.0)],
    )
    def test_bytes(self, lab, tmp_path, kind, replicas, optimizer, outer_state):
        params, cycles = 24_000, 2
        outer = {
            "plain": {"outer_momentum": 0.0},
            "momentum": {},
            "Adam": {"outer_optimizer": partial(torch.optim.Adam, lr=0.1)},
        }[optimizer]
        stores = [Counting(open_store(str(tmp_path))) for _ in range(replicas)]
        seen, reports = [[] for _ in stores], [[] for _ in stores]

        def replica(exchange):
            model = torch.nn.ParameterList([torch.ones(params)])
            inner = torch.optim.SGD(model.parameters(), lr=1.0)

            def count(report):
                store = stores[exchange.rank]
                seen[exchange.rank].append((store.sent, store.received))
                reports[exchange.rank].append(report)

            with DiLoCo(model, inner, exchange, sync_every=1, on_sync=count, **outer):
                # A sync is planned as it is in the middle of a run, with the outer state there.
                for step in range(2 + 2 * cycles):
                    lab.push(model, inner, exchange.rank, step)

        lab.run(replica, [self.exchange(kind, store, rank, replicas) for rank, store in enumerate(stores)])
        for rank in range(replicas):
            first, last = seen[rank][1], seen[rank][-1]
            counted = [last[i] - first[i] for i in (0, 1)]
            reported = [sum(r.bytes_sent for r in reports[rank][2:]), sum(r.bytes_received for r in reports[rank][2:])]
            assert reported == pytest.approx(counted, rel=0.02, abs=1000 * cycles)
        plan = plan_exchange(
            params,
            replicas,
            1e9,
            topology="gather" if kind == "gather" else "sharded",
            strict=kind == "strict",
            outer_state=outer_state,
            publish_every=2,
        )
        mean = [sum(seen[r][-1][i] - seen[r][1][i] for r in range(replicas)) / replicas / 2 / cycles for i in (0, 1)]
        assert mean == pytest.approx([plan.bytes_sent, plan.bytes_received], rel=0.03, abs=3000)

    @staticmethod
    def exchange(kind, store, rank, replicas):
        if kind == "strict":
            return ObjectStoreExchange(store, rank, replicas)
        return ElasticExchange(store, rank, replicas, Elastic(replicas, topology=kind, publish_every=2))


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"transfer": {"connections": 3}}, "transfer must be a Transfer, not "),
        ({"transfer": 16}, "transfer must be a Transfer, not "),
        ({"store": {"reads": 3}}, "store must be a StoreModel, not "),
        ({"transfer": Transfer(block_bytes=1)}, "block_bytes must be at least 65536"),
        ({"transfer": Transfer(budget_bytes=10 * MIB)}, "budget_bytes must be at least"),
    ],
)
@pytest.mark.parametrize("kind", [{"strict": True}, {"topology": "sharded"}, {"topology": "gather"}, {}])
def test_what_connect_would_refuse_is_not_planned(options, word, kind):
    with pytest.raises(ConfigurationError, match=word):
        plan_exchange(1e8, 8, 1e9, **kind, **options)


def test_a_plan_may_be_made_for_another_machine():
    """How many connections a process may have is not the same everywhere."""
    assert plan_exchange(1e8, 8, 1e9, transfer=Transfer(connections=10**7)).seconds > 0


def test_impossible_options():
    with pytest.raises(ConfigurationError, match="outer_state must be a number of tensors, 0 or more, not -1"):
        plan_exchange(1e6, 2, 1e9, outer_state=-1)
    with pytest.raises(ConfigurationError, match="publish_every"):
        plan_exchange(1e6, 2, 1e9, publish_every=0)
    with pytest.raises(ConfigurationError, match="strict must be True or False, not 'yes'"):
        plan_exchange(1e6, 2, 1e9, strict="yes")
    with pytest.raises(ConfigurationError, match="strict runs are sharded"):
        plan_exchange(1e6, 2, 1e9, strict=True, topology="gather")
    with pytest.raises(ConfigurationError, match="'auto', 'sharded' or 'gather'"):
        plan_exchange(1e6, 2, 1e9, topology="ring")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("connection_bandwidth", 0),
        ("first_byte", -0.1),
        ("put", math.inf),
        ("poll", "often"),
        ("reads", 0),
        ("writes", -1),
        ("page", 0.5),
        ("put_price", -1),
        ("get_price", None),
    ],
)
def test_impossible_stores(field, value):
    with pytest.raises(ConfigurationError, match=f"{field} must be .*, not {value!r}"):
        StoreModel(**{field: value})


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
        warn_of_long_syncs(28 * 10**9, rank=3, replicas=8, store=FAR, sync_timeout=40.0, strict=True)
        plan = plan_exchange(7e9, 8, NIC, strict=True)
        (record,) = caplog.records
        assert record.levelname == "WARNING"
        text = record.getMessage()
        requests = plan.gets + plan.puts + plan.lists + plan.deletes
        for figure in (
            "rank 3",
            "28 GB between 8 replicas",
            f"takes about {plan.seconds:.3g} s, and {plan.longest_part:.3g} s of these",
            "sync_timeout (40 s)",
            f"sends {plan.bytes_sent / 1e9:.3g} GB",
            f"receives {plan.bytes_received / 1e9:.3g} GB with {requests:.0f} requests",
            "fragments",
        ):
            assert figure in text

    def test_where_the_prefix_is_what_holds_it_up_that_is_said(self, caplog):
        warn_of_long_syncs(4 * 10**6, rank=0, replicas=1000, store=FAR, sync_timeout=60.0, strict=True)
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
        warn_of_long_syncs(size, rank=0, replicas=8, strict=True, **options)
        assert caplog.records == []

    def test_enough_for_each_part_is_less_than_for_all_of_it(self):
        """The last case above: this is how it comes that such a run ends well."""
        plan = plan_exchange(1e8, 8, NIC, strict=True)
        assert plan.longest_part < 1.5 < plan.seconds

    def test_what_the_outer_optimizer_keeps_is_published_too(self, caplog):
        options = {"rank": 0, "replicas": 4, "store": FAR, "strict": False}
        plans = [plan_exchange(1e8, 4, NIC, topology="sharded", outer_state=kept) for kept in (1.0, 2.0)]
        timeout = (plans[0].longest_part + plans[1].longest_part) / 2
        warn_of_long_syncs(4 * 10**8, sync_timeout=timeout, **options)
        assert caplog.records == []
        warn_of_long_syncs(4 * 10**8, sync_timeout=timeout, outer_state=lambda: 2.0, **options)
        assert len(caplog.records) == 1

    def test_of_the_topology_that_the_run_has(self, caplog):
        options = {"rank": 0, "replicas": 64, "store": FAR, "sync_timeout": 60.0, "strict": False}
        warn_of_long_syncs(4 * 10**8, topology="sharded", **options)
        assert caplog.records == []
        warn_of_long_syncs(4 * 10**8, topology="gather", publish_every=4, **options)
        assert "'sharded'" in caplog.text

    @pytest.mark.parametrize("strict", [True, False])
    @pytest.mark.parametrize(("store", "warnings"), [(Far, 1), (open_store, 0)], ids=["far", "folder"])
    def test_when_a_run_is_entered(self, lab, tmp_path, caplog, strict, store, warnings):
        """Of one replica, which waits for nobody: so the limit may be as short as it wants to be."""
        timing = Timing(sync_timeout=0.01)
        found = store(tmp_path if store is Far else str(tmp_path))
        if strict:
            exchange = ObjectStoreExchange(found, 0, 1, timing=timing)
        else:
            exchange = ElasticExchange(found, 0, 1, Elastic(1, grace=0.005), timing=timing)
        model = torch.nn.ParameterList([torch.ones(1000), torch.ones(3000)])
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        with DiLoCo(model, inner, exchange, sync_every=2, fragments=2):
            said = [record.getMessage() for record in caplog.records if "sync_timeout" in record.getMessage()]
            assert len(said) == warnings
            assert all("a sync of 1.2e-05 GB between 1 replicas" in text for text in said), "of the larger fragment"
            lab.push(model, inner, 0, 0)

    def test_it_is_the_run_s_own_plan_that_counts(self, tmp_path, monkeypatch):
        """Of the topology, the replicas and the limits that the run has."""
        asked = []
        monkeypatch.setattr(
            "diloco_core._elastic._exchange.warn_of_long_syncs", lambda *a, **named: asked.append((a, named))
        )
        store = open_store(str(tmp_path))
        elastic = Elastic(1, grace=1.0, topology="gather", publish_every=3)
        exchange = ElasticExchange(store, 0, 1, elastic, timing=Timing(sync_timeout=77.0))
        model = torch.nn.ParameterList([torch.ones(1000)])
        with DiLoCo(model, torch.optim.SGD(model.parameters(), lr=1.0), exchange, sync_every=2):
            pass
        (((size,), named),) = asked
        assert size == 4000
        assert named.pop("outer_state")() == 1
        expected = {
            "rank": 0,
            "replicas": 1,
            "sync_timeout": 77.0,
            "strict": False,
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
    @pytest.mark.parametrize("strict", [True, False])
    def test_a_run_knows_what_its_outer_optimizer_keeps(self, tmp_path, monkeypatch, outer, kept, strict):
        asked = []
        module = "_strict._exchange" if strict else "_elastic._exchange"
        monkeypatch.setattr(
            f"diloco_core.{module}.warn_of_long_syncs", lambda _, **named: asked.append(named["outer_state"]())
        )
        store = open_store(str(tmp_path))
        exchange = ObjectStoreExchange(store, 0, 1) if strict else ElasticExchange(store, 0, 1, Elastic(1))
        model = torch.nn.ParameterList([torch.ones(1000)])
        state = torch.random.get_rng_state()
        with DiLoCo(model, torch.optim.SGD(model.parameters(), lr=1.0), exchange, sync_every=2, **outer):
            assert asked == [kept]
        assert torch.equal(torch.random.get_rng_state(), state)

    def test_settings_of_the_store_are_taken_into_account(self, caplog):
        """With larger blocks a prefix that takes few requests is no hindrance."""
        options = {"rank": 0, "replicas": 256, "sync_timeout": 5.0, "strict": True}
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

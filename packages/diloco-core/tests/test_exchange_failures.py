"""What goes wrong in a run is told at once, by name, to every replica; a run never goes on with a part of its members."""

import json
import threading
import time

import pytest
import torch

from diloco_core import (
    ConfigurationError,
    CorruptedObjectError,
    DiLoCo,
    MismatchError,
    NonFiniteDeltaError,
    ObjectStoreAllReduce,
    ObjectStoreExchange,
    RendezvousTimeoutError,
    ReplicaLostError,
    RunExistsError,
    SyncError,
    SyncTimeoutError,
    Timing,
    UnequalSyncsError,
    in_process,
)
from diloco_core._exchange import Schema
from diloco_core._liveness import Liveness
from diloco_core._store import open_store
from diloco_core.testing import run_replicas


class Clock:
    """Time that passes only by sleeping; every thread that sleeps moves it on."""

    def __init__(self):
        self.now = 0.0
        self.lock = threading.Lock()

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        with self.lock:
            self.now += seconds


def store_exchanges(tmp_path, world_size, ranks=None, run_id="", **limits):
    clock = Clock()
    timing = Timing(**limits, clock=clock, sleep=clock.sleep) if limits else Timing()
    return [
        ObjectStoreExchange(open_store(str(tmp_path / "run")), rank, world_size, run_id=run_id, timing=timing)
        for rank in (range(world_size) if ranks is None else ranks)
    ]


def model(seed=0, width=4):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.Linear(width, 2))


def outer_loop(net, exchange, **options):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return DiLoCo(net, optimizer, exchange, **{"sync_every": 1, **options}), optimizer


def step(net, optimizer):
    net(torch.ones(5, 3)).pow(2).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def kinds(results):
    return [type(result) for result in results]


class TestMeeting:
    def test_a_replica_that_never_comes_is_named(self, tmp_path):
        def replica(exchange):
            exchange.join(Schema({}, {}))

        results = run_replicas(replica, store_exchanges(tmp_path, 4, ranks=[0, 2], join_timeout=5.0))
        first = next(result for result in results if isinstance(result, RendezvousTimeoutError))
        assert first.missing == (1, 3)
        # Whoever gives up first tells the other, which then need not wait any longer.
        assert all("missing: rank 1, 3" in str(result) for result in results)

    def test_a_thread_that_never_comes_is_named(self):
        exchanges = in_process(3, timing=Timing(join_timeout=0.05))
        results = run_replicas(lambda exchange: exchange.join(Schema({}, {})), exchanges[:2])
        assert RendezvousTimeoutError in kinds(results)
        assert "[2]" in str(results[0])

    def test_another_model_is_refused_and_the_tensor_named(self, tmp_path):
        def replica(exchange):
            outer, _ = outer_loop(model(width=4 + exchange.rank), exchange)
            with outer:
                pass

        for exchanges in (store_exchanges(tmp_path, 2), in_process(2)):
            results = run_replicas(replica, exchanges)
            assert kinds(results) == [MismatchError] * 2
            assert "tensor '0.weight'" in str(results[0])
            assert "float32[4, 3]" in str(results[0])
            assert "float32[5, 3]" in str(results[0])

    def test_other_settings_are_refused_and_named(self, tmp_path):
        def replica(exchange):
            outer, _ = outer_loop(model(), exchange, outer_lr=0.5 + 0.1 * exchange.rank)
            with outer:
                pass

        results = run_replicas(replica, store_exchanges(tmp_path, 2))
        assert kinds(results) == [MismatchError] * 2
        assert "setting 'outer_lr'" in str(results[0])
        assert "0.5" in str(results[0])

    def test_another_world_size_is_refused(self, tmp_path):
        store = open_store(str(tmp_path / "run"))
        exchanges = [ObjectStoreExchange(store, 0, 2), ObjectStoreExchange(store, 1, 3)]
        results = run_replicas(lambda exchange: exchange.join(Schema({}, {})), exchanges)
        assert kinds(results) == [MismatchError] * 2
        assert "world size" in str(results[0])

    def test_check_refuses_other_initial_values(self, tmp_path):
        def replica(exchange):
            outer, _ = outer_loop(nets[exchange.rank], exchange, init="check")
            with outer:
                pass

        nets = [model(0), model(1)]
        results = run_replicas(replica, store_exchanges(tmp_path, 2))
        assert kinds(results) == [MismatchError] * 2
        assert "values" in str(results[0])

    def test_the_first_rank_gives_the_initial_values(self, tmp_path):
        nets = [model(seed) for seed in range(3)]
        wanted = [parameter.clone() for parameter in nets[0].parameters()]

        def replica(exchange):
            outer, _ = outer_loop(nets[exchange.rank], exchange)
            with outer:
                return [parameter.clone() for parameter in nets[exchange.rank].parameters()]

        for parameters in run_replicas(replica, store_exchanges(tmp_path, 3)):
            assert all(map(torch.equal, parameters, wanted))

    def test_a_second_run_on_the_same_prefix_is_refused(self, tmp_path):
        def replica(exchange):
            with ObjectStoreAllReduce(exchange) as reduce:
                reduce.mean([torch.ones(1)])

        assert kinds(run_replicas(replica, store_exchanges(tmp_path, 2))) == [type(None)] * 2
        results = run_replicas(replica, store_exchanges(tmp_path, 2))
        assert kinds(results) == [RunExistsError] * 2
        assert "prefix of its own" in str(results[0])

    def test_two_launches_on_the_same_prefix_are_told_apart(self, tmp_path):
        exchanges = [
            store_exchanges(tmp_path, 2, ranks=[0], run_id="monday")[0],
            store_exchanges(tmp_path, 2, ranks=[1], run_id="tuesday")[0],
        ]
        results = run_replicas(lambda exchange: exchange.join(Schema({}, {})), exchanges)
        assert kinds(results) == [RunExistsError] * 2
        assert "monday" in str(results[0])
        assert "tuesday" in str(results[0])

    def test_a_second_life_of_a_rank_is_refused(self, tmp_path):
        run_replicas(lambda exchange: exchange.join(Schema({}, {})), store_exchanges(tmp_path, 1, run_id="a"))
        results = run_replicas(lambda exchange: exchange.join(Schema({}, {})), store_exchanges(tmp_path, 1, run_id="a"))
        assert kinds(results) == [RunExistsError]
        assert "no second life" in str(results[0])

    def test_a_store_without_exclusive_creation_still_shows_a_second_life(self, tmp_path, monkeypatch):
        exchange, rival = store_exchanges(tmp_path, 1) + store_exchanges(tmp_path, 1)

        def overwriting(key, data):
            exchange.store.put(key, [data])
            if data != rival_claim[0]:
                exchange.store.put(key, [rival_claim[0]])  # the rival's claim arrives right after
            return True

        rival_claim = [b""]
        rival.join(Schema({}, {}))
        rival_claim[0] = rival.store.get("claims/00000.json")
        monkeypatch.setattr(exchange.store, "create", overwriting)
        with pytest.raises(RunExistsError):
            exchange.join(Schema({}, {}))
        rival.leave()

    def test_a_foreign_object_among_the_claims_is_named(self, tmp_path):
        (exchange,) = store_exchanges(tmp_path, 2, ranks=[0])
        exchange.store.put("claims/00001.json", [b"[]"])
        with pytest.raises(RunExistsError, match=r"claims/00001.json"):
            exchange.join(Schema({}, {}))

    def test_another_outer_loop_on_the_same_exchange_is_refused(self, tmp_path):
        (exchange,) = store_exchanges(tmp_path, 1)
        exchange.join(Schema({"a": "1"}, {}))
        exchange.join(Schema({"a": "1"}, {}))
        with pytest.raises(ConfigurationError, match="already joined"):
            exchange.join(Schema({"b": "1"}, {}))
        exchange.leave()


class TestSyncing:
    def test_a_replica_that_stops_without_a_word_is_named_when_time_is_up(self, tmp_path):
        def replica(exchange):
            with ObjectStoreAllReduce(exchange) as reduce:
                reduce.mean([torch.ones(2)])
                if exchange.rank == 1:
                    hang.wait(30)
                    return
                try:
                    reduce.mean([torch.ones(2)])
                finally:
                    hang.set()

        hang = threading.Event()
        # The beat of rank 1 goes on (it runs in real time), so only the time limit of the sync ends the wait.
        exchanges = store_exchanges(tmp_path, 2, sync_timeout=50.0, beat_interval=1000.0, lost_after=1e9)
        results = run_replicas(replica, exchanges)
        assert kinds(results)[0] is SyncTimeoutError
        assert results[0].missing == (1,)
        assert "waiting for rank 1" in str(results[0])

    def test_a_thread_that_does_not_come_to_a_sync_is_named(self):
        def replica(exchange):
            with ObjectStoreAllReduce(exchange) as reduce:
                reduce.mean([torch.ones(2)])
                if exchange.rank == 1:
                    hang.wait(30)
                    return
                try:
                    reduce.mean([torch.ones(2)])
                finally:
                    hang.set()

        hang = threading.Event()
        results = run_replicas(replica, in_process(2, timing=Timing(sync_timeout=0.1)))
        assert kinds(results)[0] is SyncTimeoutError
        assert results[0].missing == (1,)

    def test_a_replica_whose_beat_stops_is_lost(self, tmp_path):
        store, clock = open_store(str(tmp_path)), Clock()
        timing = Timing(beat_interval=10.0, lost_after=60.0, clock=clock, sleep=clock.sleep)
        observer = Liveness(store, 0, timing)
        for beat in range(3):  # it lives for a while
            store.put("beats/00001", [str(beat).encode()])
            observer.check([1], sync=7)
            clock.sleep(50)
        observer.check([1], sync=7)
        clock.sleep(20)
        with pytest.raises(ReplicaLostError, match="rank 1 has shown no sign of life for 70 s, so sync 7") as caught:
            observer.check([1], sync=7)
        assert caught.value.rank == 1

    def test_a_replica_that_has_never_beaten_is_lost_too(self, tmp_path):
        clock = Clock()
        observer = Liveness(open_store(str(tmp_path)), 0, Timing(clock=clock, sleep=clock.sleep))
        observer.check([1], sync=0)
        clock.sleep(91)
        with pytest.raises(ReplicaLostError, match="rank 1"):
            observer.check([1], sync=0)

    def test_a_failure_is_told_to_the_others_at_once(self, tmp_path):
        def replica(exchange):
            outer, optimizer = outer_loop(nets[exchange.rank], exchange)
            with outer:
                for number in range(5):
                    if exchange.rank == 1 and number == 2:
                        raise ValueError("bad batch")
                    step(nets[exchange.rank], optimizer)

        for exchanges in (store_exchanges(tmp_path, 3), in_process(3)):
            nets = [model() for _ in range(3)]
            results = run_replicas(replica, exchanges)
            assert kinds(results) == [ReplicaLostError, ValueError, ReplicaLostError]
            assert results[0].rank == 1
            assert "rank 1 failed after 3 syncs" in str(results[0])
            assert "ValueError: bad batch" in str(results[0])

    def test_unequal_numbers_of_syncs_are_a_named_error_and_no_hang(self, tmp_path):
        def replica(exchange):
            outer, optimizer = outer_loop(nets[exchange.rank], exchange)
            with outer:
                for _ in range(3 + exchange.rank):
                    step(nets[exchange.rank], optimizer)

        for exchanges in (store_exchanges(tmp_path, 2), in_process(2)):
            nets = [model() for _ in range(2)]
            results = run_replicas(replica, exchanges)
            assert results[0] is None
            assert kinds(results)[1] is UnequalSyncsError
            assert results[1].rank == 0

    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
    @pytest.mark.parametrize("rank", [0, 1])
    def test_what_is_not_finite_is_refused_before_anything_is_sent(self, tmp_path, bad, rank):
        def replica(exchange):
            net = nets[exchange.rank]
            outer, optimizer = outer_loop(net, exchange)
            with outer:
                step(net, optimizer)
                if exchange.rank == rank:
                    with torch.no_grad():
                        net[1].weight[1, 2] = bad
                before.setdefault(exchange.rank, [p.clone() for p in net.parameters()])
                optimizer.step()

        nets, before = [model() for _ in range(2)], {}
        exchanges = store_exchanges(tmp_path, 2)
        results = run_replicas(replica, exchanges)
        assert kinds(results)[rank] is NonFiniteDeltaError
        assert results[rank].tensor == "1.weight"
        assert kinds(results)[1 - rank] is ReplicaLostError
        assert "NaN or infinity" in str(results[1 - rank])
        store = exchanges[0].store
        assert not [key for key in store.list("deltas/00000002/") if f"/{rank:05}." in key]
        assert "commits/00000002.json" not in store.list("commits/")

    def test_large_finite_values_are_no_overflow(self, tmp_path):
        def replica(exchange):
            tensor = torch.full((1000,), 3e38)
            with ObjectStoreAllReduce(exchange) as reduce:
                reduce.mean([tensor])
            return tensor

        (result,) = run_replicas(replica, store_exchanges(tmp_path, 1))
        assert torch.equal(result, torch.full((1000,), 3e38))

    def test_after_an_error_the_exchange_refuses_to_go_on(self, tmp_path):
        (exchange,) = store_exchanges(tmp_path, 1)
        reduce = ObjectStoreAllReduce(exchange)
        with pytest.raises(NonFiniteDeltaError):
            reduce.mean([torch.tensor([float("nan")])])
        with pytest.raises(SyncError, match="has ended"):
            reduce.mean([torch.ones(1)])

    def test_join_comes_first(self, tmp_path):
        from diloco_core._allreduce import Mean

        for exchange in (*store_exchanges(tmp_path, 1), *in_process(1)):
            with pytest.raises(SyncError, match="join"):
                exchange.sync(Mean([torch.ones(1)], 1))


class TestDamage:
    """Objects that are damaged in the store between being written and being read."""

    @staticmethod
    def damage(store, monkeypatch, folder, harm):
        """Let every object below a folder be harmed as it is written."""
        real = store.put

        def put(key, parts):
            data = bytearray()
            for part in parts:
                data += part
            return real(key, [harm(bytes(data)) if key.startswith(folder) else data])

        monkeypatch.setattr(store, "put", put)

    @staticmethod
    def flip(data):
        """Flip one bit in the first section."""
        start = 8 + int.from_bytes(data[:8], "little")
        return data[: start + 2] + bytes([data[start + 2] ^ 16]) + data[start + 3 :]

    @pytest.mark.parametrize("folder", ["deltas/", "state/"])
    @pytest.mark.parametrize("harm", ["flip", "cut", "empty"])
    def test_a_damaged_object_is_refused(self, tmp_path, monkeypatch, folder, harm):
        def replica(exchange):
            with ObjectStoreAllReduce(exchange) as reduce:
                reduce.mean([torch.ones(64)])

        exchanges = store_exchanges(tmp_path, 2)
        harms = {"flip": self.flip, "cut": lambda data: data[:-9], "empty": lambda data: b""}
        self.damage(exchanges[1].store, monkeypatch, folder, harms[harm])
        results = run_replicas(replica, exchanges)
        assert kinds(results)[0] is CorruptedObjectError, results
        assert folder in str(results[0])

    def test_a_damaged_contribution_never_reaches_the_published_state(self, tmp_path, monkeypatch):
        def replica(exchange):
            with ObjectStoreAllReduce(exchange) as reduce:
                reduce.mean([torch.ones(64)])

        exchanges = store_exchanges(tmp_path, 2)
        self.damage(exchanges[1].store, monkeypatch, "deltas/", self.flip)
        run_replicas(replica, exchanges)
        assert "state/00000000/00000.safetensors" not in exchanges[0].store.list("state/")

    def test_a_commit_record_of_others_is_refused(self, tmp_path):
        (exchange,) = store_exchanges(tmp_path, 1)
        record = {"sync": 0, "members": [{"rank": 0, "key": "deltas/00000000/else"}]}
        real = exchange.store.put

        def put(key, parts):
            return real(key, [json.dumps(record).encode()] if key.startswith("commits/") else parts)

        exchange.store.put = put
        with pytest.raises(CorruptedObjectError, match="other members"):
            ObjectStoreAllReduce(exchange).mean([torch.ones(1)])


class TestTiming:
    @pytest.mark.parametrize("name", ["join_timeout", "sync_timeout", "beat_interval", "lost_after"])
    def test_limits_are_positive(self, name):
        with pytest.raises(ConfigurationError, match=name):
            Timing(**{name: 0.0})

    def test_lost_after_leaves_room_for_a_missed_beat(self):
        with pytest.raises(ConfigurationError, match="twice beat_interval"):
            Timing(beat_interval=10.0, lost_after=15.0)


def test_the_beat_goes_on_until_the_replica_leaves(tmp_path):
    before = set(threading.enumerate())
    (exchange,) = store_exchanges(tmp_path, 1)
    exchange.join(Schema({}, {}))
    (beat,) = set(threading.enumerate()) - before
    assert beat.daemon
    exchange.leave()
    assert not beat.is_alive()
    exchange.leave()


def test_the_beat_changes(tmp_path):
    store = open_store(str(tmp_path))
    liveness = Liveness(store, 3, Timing(beat_interval=0.001, lost_after=1.0))
    liveness.start()
    try:
        seen = set()
        deadline = time.monotonic() + 30
        while len(seen) < 3 and time.monotonic() < deadline:
            seen.add(store.get("beats/00003"))
    finally:
        liveness.stop()
    assert len(seen) == 3

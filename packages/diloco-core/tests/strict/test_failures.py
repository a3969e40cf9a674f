"""What goes wrong in a run is told at once, by name, to every replica; a run never goes on with a part of its members."""

import threading
import time

import pytest
import torch
from strict_lab import claim
from training_lab import PATIENCE

from diloco_core import (
    ConfigurationError,
    NonFiniteDeltaError,
    ObjectStoreAllReduce,
    ReplicaLostError,
    SyncError,
    SyncTimeoutError,
    Timing,
    UnequalSyncsError,
    in_process,
)
from diloco_core._exchange._base import Schema
from diloco_core._exchange._endings import Progress
from diloco_core._store._open import open_store
from diloco_core._store._patient import Patient
from diloco_core._strict._liveness import Liveness
from diloco_core.testing import run_replicas

pytestmark = pytest.mark.processes


def _rank_1_does_not_come(hang):
    """A replica for every rank; that of rank 1 hangs before the second sync until the other has ended."""

    def replica(exchange):
        with ObjectStoreAllReduce(exchange) as reduce:
            reduce.mean([torch.ones(2)])
            if exchange.rank == 1:
                hang.wait(PATIENCE)
                return
            try:
                reduce.mean([torch.ones(2)])
            finally:
                hang.set()

    return replica


class TestSyncing:
    def test_a_replica_that_stops_without_a_word_is_named_when_time_is_up(self, lab, tmp_path):
        hang = threading.Event()
        # The beat of rank 1 goes on (it runs in real time), so only the time limit of the sync ends the wait.
        exchanges = lab.store_exchanges(
            tmp_path, 2, sync_timeout=50.0, beat_interval=1000.0, lost_after=1e9
        )
        results = run_replicas(_rank_1_does_not_come(hang), exchanges)
        assert lab.kinds(results)[0] is SyncTimeoutError
        assert results[0].missing == (1,)
        assert "waiting for rank 1" in str(results[0])

    def test_a_thread_that_does_not_come_to_a_sync_is_named(self, lab):
        for limit in (0.1, 2.0, 40.0):
            hang = threading.Event()
            exchanges = in_process(2, timing=Timing(sync_timeout=limit))
            results = run_replicas(_rank_1_does_not_come(hang), exchanges)
            if hang.is_set():
                break  # or the machine is so busy that not even the first sync was in time
        assert lab.kinds(results)[0] is SyncTimeoutError
        assert results[0].missing == (1,)

    def test_a_replica_whose_beat_stops_is_lost(self, lab, tmp_path):
        store, clock = open_store(str(tmp_path)), lab.Clock()
        timing = Timing(beat_interval=10.0, lost_after=60.0, clock=clock, sleep=clock.sleep)
        observer = Liveness(Patient(store, timing), 0, 2, timing, "n")
        for beat in range(3):  # it lives for a while
            store.put("beats/00001", [str(beat).encode()])
            observer.check([1], Progress(7, 6), "sync 7")
            clock.sleep(50)
        observer.check([1], Progress(7, 6), "sync 7")
        clock.sleep(20)
        with pytest.raises(
            ReplicaLostError, match="rank 1 has shown no sign of life for 70 s, so sync 7"
        ) as caught:
            observer.check([1], Progress(7, 6), "sync 7")
        assert caught.value.rank == 1

    def test_a_replica_that_has_never_beaten_is_lost_too(self, lab, tmp_path):
        clock = lab.Clock()
        timing = Timing(clock=clock, sleep=clock.sleep)
        observer = Liveness(Patient(open_store(str(tmp_path)), timing), 0, 2, timing, "n")
        observer.check([1], Progress(), "sync 1")
        clock.sleep(91)
        with pytest.raises(ReplicaLostError, match="rank 1"):
            observer.check([1], Progress(), "sync 1")

    def test_a_replica_that_beats_less_often_is_lost_later(self, lab, tmp_path):
        """As its claim says; it may have been connected with other limits."""
        clock = lab.Clock()
        timing = Timing(beat_interval=10.0, lost_after=60.0, clock=clock, sleep=clock.sleep)
        observer = Liveness(Patient(open_store(str(tmp_path)), timing), 0, 3, timing, "n")
        observer.know(claim(1, "one", beat=600.0))
        observer.know(claim(2, "two", beat=1.0))
        observer.check([1, 2], Progress(), "sync 1")
        clock.sleep(61)
        with pytest.raises(ReplicaLostError, match="rank 2 has shown no sign of life for 61 s"):
            observer.check([1, 2], Progress(), "sync 1")
        clock.sleep(1139)
        observer.check([1], Progress(), "sync 1")
        clock.sleep(1)
        with pytest.raises(ReplicaLostError, match="rank 1 has shown no sign of life for 1201 s"):
            observer.check([1], Progress(), "sync 1")

    def test_of_many_that_are_missing_some_are_looked_at_each_time(
        self, lab, tmp_path, monkeypatch
    ):
        """While beats are read, nobody looks whether the wait is over; and yet everybody has a turn."""
        store, clock = open_store(str(tmp_path)), lab.Clock()
        timing = Timing(beat_interval=10.0, lost_after=60.0, clock=clock, sleep=clock.sleep)
        observer = Liveness(Patient(store, timing), 0, 301, timing, "n")
        missing, read = list(range(1, 301)), []
        for rank in missing:
            store.put(f"beats/{rank:05}", [b"0"])
        get = store.get
        monkeypatch.setattr(
            store, "get", lambda key, *rest, **more: read.append(key) or get(key, *rest, **more)
        )
        for _ in range(5):
            before = len(read)
            observer.check(missing, Progress(), "sync 1")
            assert len(read) - before <= 64
        assert set(read) == {f"beats/{rank:05}" for rank in missing}
        clock.sleep(70)
        for rank in missing[:-1]:
            store.put(f"beats/{rank:05}", [b"1"])
        for _ in range(4):
            observer.check(missing, Progress(), "sync 1")
        with pytest.raises(ReplicaLostError, match="rank 300 has shown no sign of life"):
            observer.check(missing, Progress(), "sync 1")

    def test_a_failure_is_told_to_the_others_at_once(self, lab, tmp_path):
        def replica(exchange):
            outer, optimizer = lab.outer_loop(nets[exchange.rank], exchange)
            with outer:
                for number in range(5):
                    if exchange.rank == 1 and number == 2:
                        raise ValueError("bad batch")
                    lab.small_step(nets[exchange.rank], optimizer)

        for exchanges in (lab.store_exchanges(tmp_path, 3), in_process(3)):
            nets = [lab.small_model() for _ in range(3)]
            results = run_replicas(replica, exchanges)
            assert lab.kinds(results) == [ReplicaLostError, ValueError, ReplicaLostError]
            assert results[0].rank == 1
            assert "rank 1 failed after 2 syncs" in str(results[0])
            assert "ValueError: bad batch" in str(results[0])

    def test_unequal_numbers_of_syncs_are_a_named_error_and_no_hang(self, lab, tmp_path):
        def replica(exchange):
            outer, optimizer = lab.outer_loop(nets[exchange.rank], exchange)
            with outer:
                for _ in range(3 + 2 * exchange.rank):
                    lab.small_step(nets[exchange.rank], optimizer)

        for exchanges in (lab.store_exchanges(tmp_path, 2), in_process(2)):
            nets = [lab.small_model() for _ in range(2)]
            results = run_replicas(replica, exchanges)
            assert results[0] is None
            assert lab.kinds(results)[1] is UnequalSyncsError
            assert results[1].rank == 0

    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
    @pytest.mark.parametrize("rank", [0, 1])
    def test_what_is_not_finite_is_refused_before_anything_is_sent(self, lab, tmp_path, bad, rank):
        def replica(exchange):
            net = nets[exchange.rank]
            outer, optimizer = lab.outer_loop(net, exchange)
            with outer:
                lab.small_step(net, optimizer)
                if exchange.rank == rank:
                    with torch.no_grad():
                        net[1].weight[1, 2] = bad
                before.setdefault(exchange.rank, [p.clone() for p in net.parameters()])
                optimizer.step()

        nets, before = [lab.small_model() for _ in range(2)], {}
        exchanges = lab.store_exchanges(tmp_path, 2)
        results = run_replicas(replica, exchanges)
        assert lab.kinds(results)[rank] is NonFiniteDeltaError
        assert results[rank].tensor == "1.weight"
        assert lab.kinds(results)[1 - rank] is ReplicaLostError
        assert "NaN or infinity" in str(results[1 - rank])
        store = exchanges[0].store
        assert not [key for key in store.list("deltas/00000002/") if f"/{rank:05}." in key]
        assert "00000002" not in str(store.list("commits/"))

    def test_large_finite_values_are_no_overflow(self, lab, tmp_path):
        def replica(exchange):
            tensor = torch.full((1000,), 3e38)
            with ObjectStoreAllReduce(exchange) as reduce:
                reduce.mean([tensor])
            return tensor

        (result,) = run_replicas(replica, lab.store_exchanges(tmp_path, 1))
        assert torch.equal(result, torch.full((1000,), 3e38))

    def test_after_an_error_the_exchange_refuses_to_go_on(self, lab, tmp_path):
        (exchange,) = lab.store_exchanges(tmp_path, 1)
        reduce = ObjectStoreAllReduce(exchange)
        with pytest.raises(NonFiniteDeltaError):
            reduce.mean([torch.tensor([float("nan")])])
        with pytest.raises(SyncError, match="has ended"):
            reduce.mean([torch.ones(1)])

    def test_join_comes_first(self, lab, tmp_path):
        from diloco_core._allreduce import Mean

        for exchange in (*lab.store_exchanges(tmp_path, 1), *in_process(1)):
            with pytest.raises(SyncError, match="join"):
                exchange.sync(Mean([torch.ones(1)], 1))


class TestTiming:
    @pytest.mark.parametrize(
        "name", ["join_timeout", "sync_timeout", "beat_interval", "lost_after"]
    )
    def test_limits_are_positive(self, name):
        with pytest.raises(ConfigurationError, match=name):
            Timing(**{name: 0.0})

    def test_lost_after_leaves_room_for_a_missed_beat(self):
        with pytest.raises(ConfigurationError, match="twice beat_interval"):
            Timing(beat_interval=10.0, lost_after=15.0)


def test_the_beat_goes_on_until_the_replica_leaves(lab, tmp_path):
    before = set(threading.enumerate())
    (exchange,) = lab.store_exchanges(tmp_path, 1)
    exchange.join(Schema({}, {}))
    (beat,) = set(threading.enumerate()) - before
    assert beat.daemon
    exchange.leave()
    assert not beat.is_alive()
    exchange.leave()


def test_the_beat_changes(tmp_path):
    store = open_store(str(tmp_path))
    timing = Timing(beat_interval=0.001, lost_after=1.0)
    liveness = Liveness(Patient(store, timing), 3, 4, timing, "n")
    liveness.start()
    try:
        seen = set()
        deadline = time.monotonic() + PATIENCE
        while len(seen) < 3 and time.monotonic() < deadline:
            seen.add(store.get("beats/00003"))
    finally:
        liveness.stop()
    assert len(seen) == 3

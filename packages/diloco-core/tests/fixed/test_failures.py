"""Test that what goes wrong in a run is told to every replica at once, by name."""

import json
import re
import threading
import time

import keys_lab
import pytest
import torch
from strict_lab import LOST_AFTER, Means
from training_lab import PATIENCE

from diloco_core import (
    ConfigurationError,
    NonFiniteDeltaError,
    ObjectStoreAllReduce,
    ReplicaLostError,
    StoreExchange,
    SyncError,
    SyncTimeoutError,
    Timing,
    in_process,
)
from diloco_core._store._open import open_store
from diloco_core.testing import run_replicas

pytestmark = pytest.mark.processes


def _rank_1_does_not_come(hang):
    """Return a replica for every rank; rank 1's hangs before sync 2 until the other has ended."""

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
    def test_a_replica_that_stops_without_a_word_is_named_when_time_is_up(
        self, lab, tmp_path, exchanges_in
    ):
        hang = threading.Event()
        # The beat of rank 1 goes on (it runs in real time), so only the time limit of the sync ends
        # the wait.
        exchanges = exchanges_in(
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

    @pytest.mark.sampled
    @pytest.mark.parametrize(("bad", "rank"), [(float("nan"), 0), (-float("inf"), 1)])
    def test_what_is_not_finite_is_refused_before_anything_is_sent(
        self, lab, tmp_path, exchanges_in, bad, rank
    ):
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
        exchanges = exchanges_in(tmp_path, 2)
        results = run_replicas(replica, exchanges)
        assert lab.kinds(results)[rank] is NonFiniteDeltaError
        assert results[rank].tensor == "1.weight"
        assert lab.kinds(results)[1 - rank] is ReplicaLostError
        assert "NaN or infinity" in str(results[1 - rank])
        store = exchanges[0].store
        keys = store.list("")
        assert not keys_lab.keys_of(keys, "contribution", sync=2, rank=rank)
        records = [json.loads(store.get(key)) for key in keys_lab.keys_of(keys, "commit", sync=2)]
        assert {record["kind"] for record in records} <= {"rollback"}

    def test_after_an_error_the_exchange_refuses_to_go_on(self, tmp_path, exchanges_in):
        (exchange,) = exchanges_in(tmp_path, 1)
        reduce = ObjectStoreAllReduce(exchange)
        with pytest.raises(NonFiniteDeltaError):
            reduce.mean([torch.tensor([float("nan")])])
        with pytest.raises(SyncError, match="has ended"):
            reduce.mean([torch.ones(1)])


def test_lost_after_leaves_room_for_a_missed_beat():
    with pytest.raises(ConfigurationError, match="twice beat_interval"):
        Timing(beat_interval=10.0, lost_after=15.0)


@pytest.mark.parametrize("fails", [False, True], ids=["always", "after a failure"])
def test_the_beat_changes_until_the_replica_leaves(tmp_path, caplog, fails):
    """Also after one that could not be written."""
    store, failures, seen = open_store(str(tmp_path)), [], set()
    put = store.put

    def failing(key, parts):
        if fails and seen and keys_lab.of("beat")(key) and not failures:
            failures.append(key)
            raise OSError("the disk is full")
        return put(key, parts)

    store.put = failing
    before = set(threading.enumerate())
    timing = Timing(beat_interval=0.001, lost_after=1.0, sleep=lambda seconds: None)
    exchange = StoreExchange(store, 0, 1, timing=timing)
    ObjectStoreAllReduce(exchange).mean([torch.ones(1)])
    deadline = time.monotonic() + PATIENCE
    while len(seen) < 3 + fails and time.monotonic() < deadline:
        seen.add(store.get(keys_lab.beat_key(0)))
    (beat,) = set(threading.enumerate()) - before
    assert beat.daemon
    exchange.leave()
    assert not beat.is_alive()
    assert len(seen) == 3 + fails
    assert len(failures) == caplog.text.count("rank 0 could not write its beat") == fails


class TestSilence:
    """Rank 0 waits in mean 2 for ranks that died without a word, and are not expected back."""

    def dies(self, run, *ranks, after=0.0):
        """Let some ranks live so many seconds longer, and die before they contribute."""

        def before(process, _, key):
            if process.rank in ranks and keys_lab.of("contribution", sync=2)(key):
                process.sleep(after)
                process.die()

        run.before = before

    def lost(self, run, *, seconds):
        """Return the rank that rank 0 calls lost after ``seconds``, or up to eight more."""
        (result, *_) = run.live(until=2)
        assert isinstance(result, ReplicaLostError), result
        found = re.search(
            rf"rank {result.rank} has shown no sign of life for (\d+) s\. ", str(result)
        )
        assert found
        assert "start all ranks again on another prefix" in str(result)
        assert seconds <= int(found[1]) <= seconds + 8
        return result.rank

    def test_a_replica_that_has_never_beaten_is_lost_too(self, new_store):
        class NoBeats(new_store):
            def write(self, key, data):
                if not keys_lab.of("beat", rank=1)(key):
                    super().write(key, data)

        run = Means(2, store=NoBeats())
        self.dies(run, 1)
        assert self.lost(run, seconds=LOST_AFTER) == 1

    def test_a_replica_that_beats_less_often_is_lost_later(self, new_store):
        """As its beats say; it may have been connected with other limits."""
        limits = {
            0: {"beat_interval": 10.0, "lost_after": 60.0, "sync_timeout": 5000.0},
            1: {"beat_interval": 600.0, "lost_after": 1200.0},
            2: {"beat_interval": 1.0, "lost_after": LOST_AFTER, "sync_timeout": 5000.0},
        }
        run = Means(3, limits=limits, store=new_store())
        self.dies(run, 1, 2)
        assert self.lost(run, seconds=60.0) == 2
        run = Means(3, limits=limits, store=new_store())
        self.dies(run, 1)
        assert self.lost(run, seconds=1200.0) == 1

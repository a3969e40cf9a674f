"""A store that is away for less than sync_timeout is waited out, and nobody counts as lost; one that stays away is named."""

import threading

import pytest
import torch

from diloco_core import DiLoCo, ObjectStoreExchange, ReplicaLostError, StoreUnavailableError, Timing
from diloco_core._exchange._endings import Progress
from diloco_core._store._open import open_store
from diloco_core._store._patient import Patient
from diloco_core._strict._liveness import Liveness
from diloco_core._timing import Wait
from diloco_core.testing import run_replicas

LIMITS = {"sync_timeout": 1000.0, "beat_interval": 10.0, "lost_after": 90.0}


class SharedTime:
    """Virtual time of several threads: it moves on when all of them sleep, to where the first one wakes."""

    def __init__(self, threads):
        self.now = self.ended = 0.0
        self.running = threads
        self.changed = threading.Condition()
        self.wakes = {}

    def __call__(self):
        return self.now

    def sleep(self, seconds, woken=lambda: False):
        with self.changed:
            mine = object()
            self.wakes[mine] = self.now + max(seconds, 1e-3)
            self.advance()
            while mine in self.wakes and not woken():
                self.changed.wait()
            self.wakes.pop(mine, None)

    def change(self, threads):
        with self.changed:
            self.running += threads
            self.advance()

    def advance(self):
        if self.wakes and len(self.wakes) >= self.running:
            self.now = max(self.now, min(self.wakes.values()))
            self.wakes = {mine: wake for mine, wake in self.wakes.items() if wake > self.now}
        self.changed.notify_all()


class VirtualEvent:
    """What stops a beat, waited for in virtual time; the thread that waits for it takes part in that."""

    def __init__(self, time):
        self.time, self.stopped, self.known = time, False, False

    def wait(self, seconds):
        if not self.known:
            self.known = True
            self.time.change(1)
        self.time.sleep(seconds, lambda: self.stopped)
        if self.stopped:
            self.time.change(-1)
        return self.stopped

    def set(self):
        with self.time.changed:
            self.stopped = True
            self.time.changed.notify_all()


class Away:
    """A store that cannot be reached for a while, by anybody or by one replica only."""

    retries = False

    def __init__(self, store, clock, start, seconds):
        self.inner, self.clock, self.start, self.stop = store, clock, start, start + seconds
        self.patience = 60.0
        self.downtime = 0.0
        self.uri, self.near = store.uri, False  # waits look less often

    def __getattr__(self, name):
        if (
            name in {"put", "create", "get", "open", "list", "delete"}
            and self.start <= self.clock() < self.stop
        ):
            raise StoreUnavailableError("the store is away")
        return getattr(self.inner, name)


def train(lab, tmp_path, start, seconds):
    """Three replicas, whose steps take 50, 110 and 170 s, and whose store is away for a while."""

    def replica(exchange):
        model = lab.fill(torch.nn.Linear(4, 3))
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        try:
            with DiLoCo(model, inner, exchange, sync_every=2):
                for step in range(6):
                    time.sleep(50.0 + 60.0 * exchange.rank)
                    lab.push(model, inner, exchange.rank, step)
            return lab.values(model)
        finally:
            time.ended = time.now  # beats that are under way may still wait, and let time pass
            time.change(-1)

    time = SharedTime(3)
    timing = Timing(**LIMITS, clock=time, sleep=time.sleep)
    exchanges = []
    for rank in range(3):
        store = Away(open_store(str(tmp_path / "run")), time, start, seconds)
        exchanges.append(ObjectStoreExchange(store, rank, 3, timing=timing))
        exchanges[-1]._liveness._stop = VirtualEvent(time)
    return run_replicas(replica, exchanges), time


@pytest.mark.parametrize("start", [0.01, 60.0, 102.0, 250.0])
def test_a_short_outage_is_waited_out_and_nobody_is_lost(lab, tmp_path, start):
    wanted, _ = train(lab, tmp_path / "a", 1e9, 0.0)
    found, time = train(lab, tmp_path / "b", start, 0.9 * LIMITS["sync_timeout"])
    assert lab.identical([*wanted, *found]), found
    assert time.now > start + 0.9 * LIMITS["sync_timeout"]


@pytest.mark.parametrize("start", [60.0, 250.0])
def test_a_long_outage_is_an_error_of_the_store(lab, tmp_path, monkeypatch, start):
    # Real ones, in which no virtual time passes.
    monkeypatch.setattr("diloco_core._strict._liveness._STOP_SECONDS", 0.01)
    results, time = train(lab, tmp_path, start, 3 * LIMITS["sync_timeout"])
    assert lab.kinds(results) == [StoreUnavailableError] * 3, results
    # Telling the others is not waited for once more.
    assert time.ended < start + 1.5 * LIMITS["sync_timeout"]


class TestObserver:
    @staticmethod
    def observer(lab, tmp_path, start=1e9, seconds=0.0):
        clock = lab.Clock()
        timing = Timing(**LIMITS, clock=clock, sleep=clock.sleep)
        store = Patient(Away(open_store(str(tmp_path)), clock, start, seconds), timing)
        store.patience = LIMITS["sync_timeout"]
        return Liveness(store, 0, 2, timing, "n"), clock

    def test_time_without_the_store_is_not_counted(self, lab, tmp_path):
        liveness, clock = self.observer(lab, tmp_path, start=80.0, seconds=900.0)
        while clock.now < 1060.0:
            self.observe(liveness, clock, 1)
        assert clock.now > 1060.0
        with pytest.raises(
            ReplicaLostError, match=r"rank 1 has shown no sign of life for 1?[0-9]{2} s"
        ):
            self.observe(liveness, clock, 5)

    def test_many_short_outages_do_not_hide_a_death(self, lab, tmp_path):
        liveness, clock = self.observer(lab, tmp_path)
        with pytest.raises(ReplicaLostError):
            self.observe(liveness, clock, 20, away=5.0)
        assert clock.now > 130.0  # of which 25 s or so without the store

    @staticmethod
    def observe(liveness, clock, times, away=0.0):
        """Look for a replica that never beats; the store may be away at the beginning of every look."""
        store = liveness._store.store
        for _ in range(times):
            if away:
                store.start, store.stop = clock.now, clock.now + away
            liveness.check([1], Progress(), "sync 1")
            clock.sleep(20.0)


def test_a_wait_does_not_count_the_time_without_the_store(lab):
    clock, away = lab.Clock(), [0.0]
    timing = Timing(clock=clock, sleep=clock.sleep)
    wait = Wait(
        timing, True, 100.0, lambda: None, lambda: KeyError("over"), downtime=lambda: away[0]
    )
    clock.now, away[0] = 150.0, 90.0
    wait.pause()
    assert wait.elapsed() < 61.0
    clock.now += 45.0
    wait.pause()
    with pytest.raises(KeyError, match="over"):
        wait.pause()

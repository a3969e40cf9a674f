"""How long a strict sync waits and what it says then; and records that are taken away while a run lives."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from diloco_core import (
    CorruptedObjectError,
    DiLoCo,
    RendezvousTimeoutError,
    RunExistsError,
    SyncTimeoutError,
    Timing,
    export,
)
from diloco_core._allreduce import Mean
from diloco_core._arithmetic._sharded import Scratch
from diloco_core._exchange._base import Schema
from diloco_core._exchange._endings import Progress
from diloco_core._store._open import open_store
from diloco_core._store._patient import Patient
from diloco_core._strict._participant import Participant
from diloco_core._strict._sync._sync import StoreSync
from diloco_core.testing import run_replicas


class TestWaits:
    @pytest.fixture
    def sync(self, lab):
        clock = lab.Clock()
        timing = Timing(sync_timeout=50.0, clock=clock, sleep=clock.sleep)
        store = SimpleNamespace(near=True, uri="file:///run", downtime=0.0)
        job = Mean([torch.ones(4)], 2)
        job.begin()
        participant = Participant(
            store, 0, 2, 32 * "0", timing, None, 64, Scratch(64), lambda: None, lambda: None
        )
        return SimpleNamespace(
            one=StoreSync(participant, Progress(), job), clock=clock, store=store
        )

    def test_time_without_the_store_does_not_count(self, sync):
        wait = sync.one._wait(lambda: None, lambda: [1])
        sync.clock.now, sync.store.downtime = 80.0, 40.0
        wait.pause()
        sync.clock.now, sync.store.downtime = 131.0, 81.0
        wait.pause()
        with pytest.raises(SyncTimeoutError, match="waiting for rank 1") as caught:
            wait.pause()
        assert caught.value.missing == (1,)

    def test_a_process_that_stood_still_itself_does_not_name_nobody(self, sync):
        wait = sync.one._wait(lambda: None, list)
        sync.clock.now = 51.0
        wait.pause()
        with pytest.raises(
            SyncTimeoutError, match="within 50 s; no rank is missing, so this process itself stood"
        ) as caught:
            wait.pause()
        assert caught.value.missing == ()

    def test_the_log_says_once_a_minute_who_is_waited_for(self, sync, caplog):
        missing = [1]
        wait = sync.one._wait(lambda: None, lambda: missing)
        wait._deadline = 500.0
        while sync.clock.now < 200.0:
            wait.pause()
        said = [record.getMessage() for record in caplog.records]
        assert [int(text.rsplit(" for ")[2].split()[0]) for text in said] == [60, 120, 180]
        assert (
            said[0]
            == "rank 0: mean 1 has been waiting for rank 1 for 60 s, and gives up after 50 s"
        )
        missing.clear()
        while sync.clock.now < 300.0:
            wait.pause()
        assert len(caplog.records) == 3

    def test_where_a_damaged_shard_is_waited_for_that_is_what_is_said(self, sync):
        wait = sync.one._wait(lambda: None, lambda: [1])
        sync.one._repairs._asked[1] = CorruptedObjectError(
            "state/00000000/00001.safetensors: the checksum is wrong"
        )
        sync.clock.now = 51.0
        wait.pause()
        with pytest.raises(CorruptedObjectError, match="the checksum is wrong"):
            wait.pause()

    def test_who_waits_for_shards_sees_that_another_run_uses_the_prefix(self, sync):
        def taken():
            raise RunExistsError("the prefix is taken")

        sync.store.list = lambda prefix: {}
        sync.store.store = SimpleNamespace(near=True)
        sync.one._participant = replace(sync.one._participant, check_claim=taken)
        with pytest.raises(RunExistsError, match="the prefix is taken"):
            sync.one._adopt()

    def test_it_looks_around_while_it_waits(self, sync):
        looks = []
        wait = sync.one._wait(lambda: looks.append(sync.clock.now), lambda: [1])
        while sync.clock.now < 49.0:
            wait.pause()
        assert len(looks) >= 100


def test_who_wakes_up_past_the_deadline_takes_what_has_arrived(tmp_path):
    """Rank 1 contributes while rank 0 stands still, and stands still itself before it can write the record of the sync."""
    now, later = [0.0], []

    def sleep(seconds):
        now[0] += seconds
        if later:
            later.pop(0)()

    timing = Timing(sync_timeout=50.0, clock=lambda: now[0], sleep=sleep)
    liveness = SimpleNamespace(check=lambda *_: None, ending=lambda _: None)
    tensors, syncs = [torch.full((4,), float(rank)) for rank in range(2)], []
    for rank in range(2):
        job = Mean([tensors[rank]], 2)
        job.begin()
        store = Patient(open_store(str(tmp_path / "run")), timing)
        participant = Participant(
            store, rank, 2, 32 * "0", timing, liveness, 64, Scratch(64), bool, bool
        )
        syncs.append(StoreSync(participant, Progress(), job))

    def stand_still():
        syncs[1].contribute()
        now[0] += 5000.0

    syncs[0].contribute()
    later = [stand_still, lambda: None, lambda: syncs[1].finish([])]
    assert syncs[0].finish([]).committed
    assert all(torch.equal(tensor, torch.full((4,), 0.5)) for tensor in tensors)


def test_the_log_says_once_a_minute_who_has_not_come(lab, tmp_path, caplog):
    (exchange,) = lab.store_exchanges(tmp_path, 3, ranks=[0], join_timeout=200.0)
    with pytest.raises(RendezvousTimeoutError):
        exchange.join(Schema({}, {}))
    said = [record.getMessage() for record in caplog.records]
    assert [int(text.split(" after ")[1].split()[0]) for text in said] == [60, 120, 180]
    assert said[0].startswith("rank 0: 1 of 3 replicas have met at ")
    assert "; waiting for ranks 1, 2, for up to 200 s. A rank that is missing is" in said[0]
    assert said[0].endswith("DiLoCo(...) refused an argument: look at its log.")


@pytest.mark.parametrize("gone", [["manifest.json"], ["claims/00000.json", "claims/00001.json"]])
def test_records_that_are_taken_away_while_a_run_lives(lab, tmp_path, gone):
    """Nobody in the run needs them any more, and it ends as it would have; nobody else mistakes the prefix for a free one."""

    def replica(exchange, harm):
        model = lab.fill(torch.nn.Linear(3, 2))
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        with DiLoCo(model, inner, exchange, sync_every=1):
            for step in range(4):
                lab.push(model, inner, exchange.rank, step)
                if harm and step == 1:
                    for key in gone:
                        (tmp_path / "b" / "run" / key).unlink(missing_ok=True)
        return lab.values(model)

    wanted = lab.run(
        lambda exchange: replica(exchange, False), lab.store_exchanges(tmp_path / "a", 2)
    )
    found = lab.run(
        lambda exchange: replica(exchange, True), lab.store_exchanges(tmp_path / "b", 2)
    )
    assert lab.identical([*wanted, *found])
    results = run_replicas(
        lambda exchange: replica(exchange, False), lab.store_exchanges(tmp_path / "b", 2)
    )
    assert lab.kinds(results) == [RunExistsError] * 2, results
    assert export(str(tmp_path / "b" / "run"), tmp_path / "model") == 4, (
        "the manifest is there again"
    )

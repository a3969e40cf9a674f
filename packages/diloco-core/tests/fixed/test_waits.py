"""Test how long a fixed run waits, for ranks and for the store, and what it says then."""

from dataclasses import dataclass

import keys_lab
import pytest
import torch
from strict_lab import Changing, Means, Run
from training_lab import fill, identical, push, values

from diloco_core import (
    CorruptedObjectError,
    DiLoCo,
    ObjectNotFoundError,
    ObjectStoreAllReduce,
    RendezvousTimeoutError,
    ReplicaLostError,
    RunExistsError,
    StoreUnavailableError,
    SyncTimeoutError,
)

LIMITS = {"sync_timeout": 500.0, "lost_after": 5000.0}
REST = 6000.0
"""Longer than anybody waits."""


class TestWaits:
    """Rank 0 waits in the second mean."""

    @pytest.fixture
    def run(self, new_store):
        return Means(2, limits=dict.fromkeys(range(2), LIMITS), store=new_store())

    def before(self, act, *, rank, kind, number=2, requests=("put", "create")):
        """Call ``act`` with the process of a rank before such requests of an object of a sync."""

        def before(process, request, key):
            if process.rank == rank and request in requests and keys_lab.of(kind, sync=number)(key):
                act(process)

        return before

    def rests(self, process):
        process.sleep(REST)

    def test_time_without_the_store_does_not_count(self, run):
        """It is away from second 100 to second 500."""

        def before(process, request, key):
            silent(process, request, key)
            if not process.rank and 100.0 <= process.clock() < 500.0:
                raise StoreUnavailableError("the store is away")

        silent = self.before(self.rests, rank=1, kind="contribution")
        run.before = before
        result, _ = run.live(until=2)
        with pytest.raises(
            SyncTimeoutError, match=r"within 500 s; .* waiting for rank 1"
        ) as caught:
            raise result
        assert caught.value.missing == (1,)
        assert 890.0 < run.ended[0] < 920.0

    def test_a_process_that_stood_still_itself_does_not_name_nobody(self, run):
        """All have contributed, but it never sees the record of that."""

        def hidden(process):
            process.sleep(1.0)
            raise ObjectNotFoundError("there is no such object")

        run.before = self.before(hidden, rank=0, kind="commit", requests=["get"])
        result, _ = run.live(until=2)
        with pytest.raises(
            SyncTimeoutError, match="within 500 s; no rank is missing, so this process itself stood"
        ) as caught:
            raise result
        assert caught.value.missing == ()

    @pytest.mark.sampled
    @pytest.mark.parametrize(
        ("kind", "what"), [("contribution", "rank 1"), ("state", "the shards of rank 1")]
    )
    def test_the_log_says_once_a_minute_who_is_waited_for(self, run, kind, what, caplog):
        run.before = self.before(lambda process: process.sleep(200.0), rank=1, kind=kind)
        assert identical([*run.live(until=2), *Means(2).live(until=2)])
        texts = [text for text in caplog.messages if f" for {what} for " in text]
        seconds = [int(text.partition(f" for {what} for ")[2].split()[0]) for text in texts]
        assert len(seconds) == 3
        assert all(0 <= second - 60 * count < 6 for count, second in enumerate(seconds, 1))
        assert " s, and gives up after 500 s" in texts[0]

    def test_where_a_damaged_shard_is_waited_for_that_is_what_is_said(self, run):
        """Its owner is alive, and does not come to write it again."""
        run.store = Changing(
            keys_lab.of("state", sync=2, rank=1), lambda key, data: bytes(len(data))
        )
        run.before = self.before(self.rests, rank=1, kind="contribution", number=3)
        result, _ = run.live(until=3)
        (shard,) = keys_lab.keys_of(run.store.objects, "state", sync=2, rank=1)
        with pytest.raises(CorruptedObjectError, match=f"{shard}: .* damaged"):
            raise result
        assert 500.0 < run.ended[0] < 520.0

    def test_who_waits_for_shards_sees_that_another_run_uses_the_prefix(self, run):
        other = type(run)(2, store=type(run.store)())
        other.live(until=1)
        (theirs,) = keys_lab.keys_of(other.store.objects, "manifest", copy=False)

        def taken(process):
            (key,) = keys_lab.keys_of(run.store.objects, "manifest", copy=False)
            run.store.damage(key, other.store.objects[theirs])
            process.sleep(REST)

        run.limits = {rank: {**LIMITS, "lost_after": 40.0} for rank in range(2)}
        run.before = self.before(taken, rank=1, kind="state")
        result, _ = run.live(until=2)
        with pytest.raises(RunExistsError, match=r"the manifest at .* now belongs to another run"):
            raise result
        assert run.ended[0] < 60.0


def test_who_wakes_up_past_the_deadline_takes_what_has_arrived(new_store):
    """Rank 1 contributes while rank 0 stands still, and then stands still itself."""
    run = Means(2, limits=dict.fromkeys(range(2), LIMITS), store=new_store())

    def before(process, request, key):
        contributed = keys_lab.keys_of(run.store.objects, "contribution", sync=2, rank=1)
        if process.rank == 1 and keys_lab.of("contribution", sync=2)(key):
            process.sleep(100.0)
        elif contributed and process not in stood_still:
            stood_still.append(process)
            if process.rank:
                process.sleep(300.0)
            else:
                process.offset = 2000.0

    run.before, stood_still = before, []
    assert identical([*run.live(until=2), *Means(2).live(until=2)])
    assert len(stood_still) == 2


@pytest.mark.sampled
def test_the_log_says_once_a_minute_who_has_not_come(tmp_path, caplog, exchanges_in):
    (exchange,) = exchanges_in(tmp_path, 3, ranks=[0], join_timeout=200.0)
    with pytest.raises(RendezvousTimeoutError):
        ObjectStoreAllReduce(exchange).mean([torch.ones(1)])
    texts = [record.getMessage() for record in caplog.records]
    assert [int(text.split(" after ")[1].split()[0]) for text in texts] == [60, 120, 180]
    assert texts[0].startswith("rank 0: 1 of 3 replicas have met at ")
    assert "; waiting for ranks 1, 2, for up to 200 s. A rank that is missing is" in texts[0]
    assert texts[0].endswith("DiLoCo(...) refused an argument: look at its log.")


SHORT = {"sync_timeout": 1000.0, "beat_interval": 10.0, "lost_after": 90.0}


def away(start, seconds):
    """Let the store be away for a while, for all processes; to be called before each request."""

    def before(process, *_):
        if start <= process.clock() < start + seconds:
            raise StoreUnavailableError("the store is away")

    return before


@dataclass
class Slow(Run):
    """Three replicas, whose steps take 50, 110 and 170 s."""

    def train(self, exchange, until):
        model = fill(torch.nn.Linear(4, 3))
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        with DiLoCo(model, inner, exchange, sync_every=2) as outer:
            while outer.inner_steps < until:
                exchange.store.sleep(50.0 + 60.0 * exchange.rank)
                push(model, inner, exchange.rank, outer.inner_steps)
        return values(model)


def train(new_store, start, seconds):
    """Return how replicas end whose store is away for a while, and when the last one ended."""
    limits = dict.fromkeys(range(3), SHORT)
    run = Slow(3, limits=limits, before=away(start, seconds), store=new_store())
    results = run.live(until=6)
    return results, max(run.ended.values())


@pytest.mark.sampled
@pytest.mark.parametrize("start", [0.5, 60.0, 102.0, 250.0])
def test_a_short_outage_is_waited_out_and_nobody_is_lost(new_store, start):
    wanted, _ = train(new_store, 1e9, 0.0)
    found, ended = train(new_store, start, 0.9 * SHORT["sync_timeout"])
    assert identical([*wanted, *found]), found
    assert ended > start + 0.9 * SHORT["sync_timeout"]


@pytest.mark.sampled
@pytest.mark.parametrize("start", [60.0, 250.0])
def test_a_long_outage_is_an_error_of_the_store(new_store, start):
    results, ended = train(new_store, start, 3 * SHORT["sync_timeout"])
    assert all(isinstance(result, StoreUnavailableError) for result in results), results
    # Telling the others is not waited for once more.
    assert ended < start + 1.5 * SHORT["sync_timeout"]


class TestObserver:
    """Rank 0 waits for rank 1, which has died without a word, and nobody waits for it to return."""

    def observe(self, new_store, outage):
        """Return when rank 0 calls rank 1 lost."""

        def before(process, request, key):
            outage(process)
            if process.rank and keys_lab.of("contribution", sync=2)(key):
                process.die()

        run = Means(2, limits={0: SHORT, 1: SHORT}, before=before, store=new_store())
        result, _ = run.live(until=2)
        with pytest.raises(ReplicaLostError, match=r"rank 1 has shown no sign of life for 9\d s"):
            raise result
        return run.ended[0]

    def test_time_without_the_store_is_not_counted(self, new_store):
        """And when it is back, all get the whole time again."""
        assert 1070.0 < self.observe(new_store, away(80.0, 900.0)) < 1100.0

    def test_many_short_outages_do_not_hide_a_death(self, new_store):
        """They are a quarter of the time."""

        def outage(process):
            if process.clock() % 20.0 < 5.0 and process.clock() > 5.0:
                raise StoreUnavailableError("the store is away")

        assert 100.0 < self.observe(new_store, outage) < 140.0

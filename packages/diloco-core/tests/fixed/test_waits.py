"""How long a sync of all ranks waits and what it says then; and records that are taken away while a
run incarnations.
"""

import keys_lab
import pytest
import torch
from strict_lab import Changing, Means
from training_lab import identical

from diloco_core import (
    CorruptedObjectError,
    ObjectNotFoundError,
    ObjectStoreAllReduce,
    RendezvousTimeoutError,
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
        """All have contributed, but it does not see the record of that, also where it has written
        it.
        """

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

    @pytest.mark.parametrize(
        ("kind", "what"), [("contribution", "rank 1"), ("state", "the shards of rank 1")]
    )
    def test_the_log_says_once_a_minute_who_is_waited_for(self, run, kind, what, caplog):
        run.before = self.before(lambda process: process.sleep(200.0), rank=1, kind=kind)
        assert identical([*run.live(until=2), *Means(2).live(until=2)])
        said = [text for text in caplog.messages if f" for {what} for " in text]
        seconds = [int(text.partition(f" for {what} for ")[2].split()[0]) for text in said]
        assert len(seconds) == 3
        assert all(0 <= second - 60 * count < 6 for count, second in enumerate(seconds, 1))
        assert said[0].endswith(" s, and gives up after 500 s")

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
    """Rank 1 contributes while rank 0 stands still, and stands still itself before it can write the
    record of the sync.
    """
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


def test_the_log_says_once_a_minute_who_has_not_come(tmp_path, caplog, exchanges_in):
    (exchange,) = exchanges_in(tmp_path, 3, ranks=[0], join_timeout=200.0)
    with pytest.raises(RendezvousTimeoutError):
        ObjectStoreAllReduce(exchange).mean([torch.ones(1)])
    said = [record.getMessage() for record in caplog.records]
    assert [int(text.split(" after ")[1].split()[0]) for text in said] == [60, 120, 180]
    assert said[0].startswith("rank 0: 1 of 3 replicas have met at ")
    assert "; waiting for ranks 1, 2, for up to 200 s. A rank that is missing is" in said[0]
    assert said[0].endswith("DiLoCo(...) refused an argument: look at its log.")

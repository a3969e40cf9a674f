"""The log around a rollback: records that are lost, and earlier incarnations that stand at them."""

from dataclasses import replace

import pytest
from damage_lab import run_of
from rollback_lab import rollbacks_in
from simulated import Schedule, SimulatedStore, SimulatedTraining, simulate, violations

from diloco_core import CorruptedObjectError, Elastic, FencedError
from diloco_core._arithmetic._contribution import Contribution
from diloco_core._run._records._keys import Delta, commit_key, shard_key
from diloco_core._run._records._records import Commit, Rollback
from diloco_core._run._repair import read_commit
from diloco_core._run._round._reload import ReloadError, Why
from diloco_core._run._sync._fork import look_back
from diloco_core._run._sync._sync import StoreSync


def _alone(act):
    """One replica that has done three syncs of one fragment; ``act`` gets its exchange, its
    incarnation and the store.
    """
    training, store = SimulatedTraining(syncs=3, sizes=(40,)), SimulatedStore()

    def train(node):
        node.exchange.leave = lambda: None
        training(node)
        act(node.exchange, node.exchange._incarnation, store)

    outcome = simulate(
        train,
        Schedule(1, latency=0.01),
        Elastic(1, grace=5.0, topology="sharded"),
        store=store,
        most_incarnations=1,
    )
    return outcome.results[0, 1]


def test_a_record_that_was_lost_is_not_written_over_a_rollback():
    """Its number was free, so another incarnation has decided to go back; the record is known here,
    and was just found missing.
    """
    key = commit_key(3)

    def act(exchange, incarnation, store):
        record = Rollback(3, (2,), (), {0: 1}, run=run_of(store)).to_json()
        store.remove(key)
        del store.decided[key]
        create = exchange.store.create

        def raced(other, data):
            if other == key:
                store.write(key, record)
            return create(other, data)

        exchange.store.create = raced
        with pytest.raises(ReloadError) as raised:
            read_commit(incarnation, 3, decided=True)
        assert raised.value.why is Why.WENT_BACK
        assert store.objects[key] == record
        assert store.changed == []

    assert _alone(act) is None


def test_an_earlier_incarnation_looks_what_has_become_of_the_record_that_it_stands_at():
    """It was lost without a trace, and a rollback has its number; the incarnation slept, and would
    decide the next sync.
    """
    key = commit_key(3)

    def act(exchange, incarnation, store):
        whole = store.objects[key]
        store.remove(key)
        look_back(incarnation)
        assert key not in store.objects, "it has just seen it"
        incarnation.timing.sleep(6.0)
        look_back(incarnation)
        assert store.objects[key] == whole, "lost, and written again"
        store.damage(key, Rollback(3, (2,), (), {0: 1}, run=run_of(store)).to_json())
        with pytest.raises(ReloadError) as raised:
            look_back(incarnation)
        assert raised.value.why is Why.WENT_BACK

    assert _alone(act) is None


def test_a_rollback_in_the_place_of_the_next_sync_is_something_to_obey():
    """An incarnation that does not contribute looks for it, too."""

    def act(exchange, incarnation, store):
        assert not exchange.behind()
        store.write(commit_key(4), Rollback(4, (2,), (), {0: 1}, run=run_of(store)).to_json())
        assert exchange.behind()

    assert _alone(act) is None


def test_a_sync_that_meets_a_rollback_is_ready_and_ends_with_it():
    """Between its halves others have gone back, and this incarnation has not agreed to that."""

    def act(exchange, incarnation, store):
        job = incarnation.fragments[0].job
        job.contribution = Contribution(steps=(12, 16))
        job.begin()
        pending = exchange.begin(job)
        store.write(commit_key(4), Rollback(4, (2,), (), {0: 1}, run=run_of(store)).to_json())
        assert pending.ready(), "nothing is to be waited for"
        with pytest.raises(FencedError, match="began before that, so it stops"):
            pending.finish()

    assert _alone(act) is None


@pytest.mark.parametrize("trace", ["state", "deltas"])
def test_a_number_whose_record_is_lost_is_not_taken_by_a_rollback(trace):
    """Whoever has seen that record would decide the next number, so the rollback takes that one,
    and both are closed.
    """
    settings = Elastic(1, grace=5.0, topology="sharded", retention=4)
    before, store = SimulatedTraining(syncs=4, sizes=(40,)), SimulatedStore()
    assert simulate(before, Schedule(1, latency=0.01), settings, store=store).finished
    del store.decided[commit_key(4)]
    store.remove(commit_key(4))
    for key in list(store.objects):
        if key.startswith(("state/00000004/", "deltas/00000004/")):
            store.damage(key, b"") if trace == "state" else store.remove(key)
    if trace == "deltas":
        store.write(Delta(5, 0, 1, 8, 10, "0" * 16, "0" * 16).key, b"of an incarnation that slept")
        store.damage(shard_key(3, 0, 0, ""), b"")
        for key in [key for key in store.objects if key.startswith("deltas/00000003/")]:
            store.damage(key, b"")
    training = SimulatedTraining(syncs=5, sizes=(40,), salts=dict(before.salts))
    outcome = simulate(
        training,
        Schedule(1, latency=0.01),
        replace(settings, resume="newest-whole"),
        store=store,
        most_incarnations=1,
    )
    assert violations(outcome, training) == []
    kept = 3 if trace == "state" else 2
    fence = {0: 2}
    assert rollbacks_in(store)[-2:] == [
        Rollback(5, (kept,), tuple(range(kept + 1, 5)), fence, run=run_of(store)),
        Rollback(4, (kept,), (), fence, run=run_of(store)),
    ]
    later = SimulatedTraining(syncs=6, sizes=(40,), salts=dict(training.salts))
    outcome = simulate(
        later,
        Schedule(1, latency=0.01),
        replace(settings, resume=True),
        store=store,
        most_incarnations=1,
    )
    assert violations(outcome, later) == []


def test_an_earlier_incarnation_that_reloads_for_another_reason_stops_too(monkeypatch):
    def act(exchange, incarnation, store):
        store.write(commit_key(4), Rollback(4, (3,), (), {0: 1}, run=run_of(store)).to_json())

        def reload(_):
            raise ReloadError(Why.SUPERSEDED)

        monkeypatch.setattr(StoreSync, "finish", reload)
        exchange.sync(incarnation.fragments[0].job)

    assert isinstance(_alone(act), FencedError)


def test_a_record_that_does_not_follow_the_one_before_is_refused():
    """Of the log before it, of the newest rollback, and of what was counted."""

    def act(exchange, incarnation, store):
        progress = incarnation.fragments[0]
        start = progress.positions[0]
        member = Delta(4, 0, 1, start, start + 2, progress.digest, "0" * 16)
        commit = Commit(
            4,
            0,
            progress.digest,
            incarnation.standing.previous,
            (member,),
            {0: start + 2},
            4,
            incarnation.rollback,
            run=run_of(store),
        )
        incarnation.verify(commit)
        for wrong in (
            {"previous": "0" * 16},
            {"rollback": 1},
            {"positions": {0: start + 2, 1: 5}},
            {"sync": 5},
            {"outer_steps": 5},
        ):
            with pytest.raises(CorruptedObjectError, match="does not follow"):
                incarnation.verify(replace(commit, **wrong))

    assert _alone(act) is None

"""The log around a rollback: records that are lost, and earlier incarnations that stand at them."""

import pytest
from damage_lab import run_of
from simulated import SimulatedStore, SimulatedTraining, once, violations

from diloco_core import Elastic, FencedError
from diloco_core._arithmetic._contribution import Contribution
from diloco_core._run._records._keys import commit_key
from diloco_core._run._records._records import Rollback

KEY = commit_key(3)
SHARDED = Elastic(1, grace=5.0, topology="sharded")


def back_to(sync, number, store):
    """A rollback that another incarnation has decided."""
    return Rollback(number, (sync,), (), {0: 1}, run=run_of(store)).to_json()


def lost(store, connection):
    store.remove(KEY)


def replaced(store, connection):
    """It was lost without a trace, and a rollback has its number."""
    store.damage(KEY, back_to(2, 3, store))


def raced(store, connection):
    """A rollback takes its number in the moment in which it is to be written again."""
    create, record = connection.create, back_to(2, 3, store)
    store.remove(KEY)
    store.decided.pop(KEY)

    def late(key, data):
        if key == KEY:
            store.write(KEY, record)
        return create(key, data)

    connection.create = late


def followed(store, connection):
    """A rollback has the number of the next sync."""
    store.write(commit_key(4), back_to(2, 4, store))


@pytest.mark.parametrize("meddle", [lost, replaced, raced, followed])
def test_a_sleeper_looks_what_has_become_of_its_record(meddle):
    """It would decide the next sync, and has not agreed to go back."""
    training, store, held = SimulatedTraining(syncs=6, sizes=(40,)), SimulatedStore(), []

    def train(node):
        begin = node.exchange.begin

        def slow(*args, **options):
            if KEY in store.objects and commit_key(4) not in store.objects:
                held.append(store.objects[KEY])
                node.sleep(20.0)
                meddle(store, node.connection)
                held.append(store.objects.get(KEY))
                assert node.exchange.behind() == (meddle is followed)
            return begin(*args, **options)

        node.exchange.begin = slow
        return training(node)

    outcome = once(train, 1, SHARDED, store=store)
    if meddle is lost:
        assert violations(outcome, training) == []
        assert store.objects[KEY] == held[0]
        return
    assert isinstance(outcome.results[0, 1], FencedError)
    assert store.objects[KEY] == (back_to(2, 3, store) if meddle is raced else held[-1])
    assert store.changed == []


def test_a_sync_that_meets_a_rollback_is_ready_and_ends_with_it():
    """Between its halves others have gone back, and this incarnation has not agreed to that."""
    training, store, ended = SimulatedTraining(syncs=3, sizes=(40,)), SimulatedStore(), []

    def train(node):
        node.exchange.leave = lambda: None
        training(node)
        job = node.exchange._incarnation.fragments[0].job
        job.contribution = Contribution(steps=(12, 16))
        job.begin()
        pending = node.exchange.begin(job)
        store.write(commit_key(4), back_to(2, 4, store))
        ended.append(pending.ready())
        pending.finish()

    outcome = once(train, 1, SHARDED, store=store)
    assert ended == [True], "nothing is to be waited for"
    assert isinstance(outcome.results[0, 1], FencedError)
    assert "began before that, so it stops" in str(outcome.results[0, 1])

"""Elastic runs whose state is published encoded, so that most states are only changes."""

import copy
import logging

import pytest
from damage_lab import flip, late_bit
from rollback_lab import rollbacks_in
from simulated import (
    CheckedStore,
    Fault,
    Schedule,
    SimulatedTraining,
    flawless,
    simulate,
    violations,
)

from diloco_core import CorruptedObjectError, Elastic
from diloco_core._run._records._keys import done_key, shard_key
from diloco_core._run._records._records import Done

_SETTINGS = Elastic(2, grace=8.0, topology="sharded")


def _training(syncs, before=None):
    salts = dict(before.salts) if before else {}
    return SimulatedTraining(syncs, (70, 40), state_codec="e2m1", full_state_every=3, salts=salts)


def _run(training, store, settings=_SETTINGS, faults=(), seed=0, **options):
    schedule = Schedule(2, seed, (), faults, restart_after=1.0, latency=0.01)
    outcome = simulate(training, schedule, settings, store=store, **options)
    return outcome, violations(outcome, training)


@pytest.fixture(scope="module")
def stopped():
    """A run that has ended after ten syncs, of which 5 and 6 are whole."""
    training, store = _training(9), CheckedStore()
    _, wrong = _run(training, store)
    assert wrong == []
    return training, store


def _resumed(stopped, damage, syncs=12, resume=True, **options):
    before, original = stopped
    store = copy.deepcopy(original)
    damage(store)
    training = _training(syncs, before=before)
    settings = Elastic(2, grace=8.0, topology="sharded", resume=resume)
    outcome, wrong = _run(training, store, settings=settings, seed=1, **options)
    # What was removed here may still be missing when the run first deletes something.
    return outcome, [what for what in wrong if "needs it" not in what], store


def _in_update(data):
    """The same bytes but for one bit of the change, of a state that is not whole."""
    return flip(data, 8 * (len(data) - 45))


def test_what_is_kept_and_what_the_records_say(stopped):
    _, store = stopped
    states = {key.split("/")[1]: key for key in store.objects if key.startswith("state/")}
    # The two newest of each can be made.
    assert sorted(map(int, states)) == [5, 6, 7, 8, 9, 10]
    for sync in range(5, 11):
        index = (sync - 1) % 2
        done = Done.from_json(store.objects[done_key(sync, index)], sync, index, "")
        assert done.full == (sync in (5, 6))
        assert (b'"values.0"' in store.objects[shard_key(sync, index, 1, "")]) == done.full
    assert not any(
        key.startswith(("initial/", "deltas/00000005", "deltas/00000007")) for key in store.objects
    )


@pytest.mark.sampled
@pytest.mark.parametrize("sync", [9, 10])
@pytest.mark.parametrize("how", ["header", "outer state", "update", "cut", "gone"])
def test_the_newest_change_is_made_again_with_the_same_bytes(stopped, sync, how, caplog):
    key = shard_key(sync, (sync - 1) % 2, 1, "")
    whole = stopped[1].objects[key]

    def damage(store):
        header = 8 + int.from_bytes(whole[:8], "little")
        damaged = {
            "header": flip(whole, 80),
            "outer state": flip(whole, 8 * header + 9),
            "update": _in_update(whole),
            "cut": whole[:-30],
        }
        store.remove(key) if how == "gone" else store.damage(key, damaged[how])

    _, wrong, store = _resumed(stopped, damage, syncs=10, most_incarnations=1)
    assert wrong == []
    assert store.objects[key] == whole
    assert f"writing {key} again with the same content" in caplog.text


def test_a_whole_state_is_made_again_from_the_changes_before_it(stopped):
    """It is the newest of its fragment here; what came before is still there."""
    training, store = _training(5), CheckedStore()
    _, wrong = _run(training, store)
    assert wrong == []
    key = shard_key(5, 0, 1, "")
    whole = store.objects[key]

    def damage(store):
        store.damage(key, late_bit(whole))

    _, wrong, store = _resumed((training, store), damage, syncs=7, most_incarnations=1)
    assert wrong == []
    assert store.contents[key] == whole
    assert store.objects.get(key, whole) == whole


def test_a_run_can_go_back_before_a_lost_change(stopped):
    """Its contributions are gone, so nothing can make it again."""
    key = shard_key(7, 0, 1, "")

    def damage(store):
        store.damage(key, _in_update(store.objects[key]))

    outcome, _, _ = _resumed(stopped, damage, most_incarnations=1)
    errors = [each for each in outcome.errors().values() if isinstance(each, CorruptedObjectError)]
    assert any(key in str(error) and "newest-whole" in str(error) for error in errors)
    _, wrong, store = _resumed(stopped, damage, resume="newest-whole")
    assert wrong == []
    (rollback,) = rollbacks_in(store)
    assert rollback.states == (5, 10)
    assert rollback.given_up == (7, 9)


def test_what_a_run_went_back_to_is_kept_with_all_that_it_is_made_of(stopped):
    """A replica that sleeps through that may still delete it."""

    def damage(store):
        for sync in (9, 10):
            key = shard_key(sync, (sync - 1) % 2, 1, "")
            store.damage(key, _in_update(store.objects[key]))
            for delta in [key for key in store.objects if key.startswith(f"deltas/{sync:08}/")]:
                store.damage(delta, late_bit(store.objects[delta]))

    for seed in range(3):
        faults = [Fault(0, 1, 20 + 9 * seed, "zombie", 60.0)]
        _, wrong, store = _resumed(stopped, damage, 20, "newest-whole", faults=faults)
        assert wrong == []
        assert rollbacks_in(store)


@pytest.mark.parametrize(
    ("what", "reloads", "message"),
    [
        (3, 0, "rank 1: the global copy of shard 1 of fragment 0 has changed in memory"),
        (40, 1, "rank 1: the global copy of fragment 0 has changed in memory since sync 3"),
    ],
    ids=["own shard", "another's"],
)
def test_what_changed_in_memory_is_read_again(what, reloads, message, caplog):
    """Nobody adds a change to it, nor publishes what comes of it."""
    training, jobs = SimulatedTraining(6, (70,), state_codec="e2m1", full_state_every=3), []

    def prepare(node):
        restore = node.exchange.restore

        def remember(jobs_of_rank, **options):
            jobs.extend(jobs_of_rank if node.rank == 1 else [])
            return restore(jobs_of_rank, **options)

        node.exchange.restore = remember

    class Spoiling(CheckedStore):
        def write(self, key, data):
            super().write(key, data)
            if key == "commits/00000004.json":
                jobs[0].copy[0][what] += 0.5

    options = {"store": Spoiling(), "prepare": prepare, "most_incarnations": 1}
    with caplog.at_level(logging.ERROR, "diloco_core"):
        flawless(training, 3, Elastic(2, grace=20.0, topology="sharded"), **options)
    assert [report.reloaded for report in training.reports[1, 1]].count(True) == reloads
    assert message in caplog.text
    assert not any(each.getMessage().startswith(("rank 0", "rank 2")) for each in caplog.records)

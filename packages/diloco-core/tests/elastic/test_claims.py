"""Claims that vanish: no two incarnations of a rank play one epoch unnoticed."""

import pytest
from damage_lab import asleep_after, store_of
from keys_lab import sealed_again
from simulated import Fault, Schedule, SimulatedStore, SimulatedTraining, once, simulate, violations

from diloco_core import Elastic, FencedError
from diloco_core._run._records._keys import Hint, claim_key, commit_key, highest_epochs, inner_key


def _next(store):
    """The epoch that the next incarnation of rank 0 claims."""
    training = SimulatedTraining(syncs=0, sizes=(40,), save_every=1)
    settings, schedule = Elastic(2, grace=5.0, resume=True), Schedule(2, starts=[0.0, 1e6])
    once(training, schedule, settings, store=store, limit=5000.0)
    return highest_epochs(store.objects).get(0)


@pytest.mark.parametrize("topology", ["sharded", "gather"])
def test_a_claim_vanishes_while_its_incarnation_sleeps(topology):
    """The next incarnation takes the epoch after it all the same, and the sleeper stops."""

    store, training = SimulatedStore(), SimulatedTraining(syncs=10, sizes=(40,), save_every=1)

    def train(node):
        if (node.rank, node.incarnation) == (0, 2):
            store.remove(claim_key(0, 1))
        return training(node)

    fault = Fault(0, 1, 42, "zombie", 12.0)
    schedule = Schedule(2, faults=[fault], restart_after=9.0, latency=0.01)
    settings, options = Elastic(1, grace=5.0, topology=topology), {"most_incarnations": 3}
    outcome = simulate(train, schedule, settings, store=store, **options)
    assert violations(outcome, training) == []
    assert isinstance(outcome.results[0, 1], FencedError)
    assert "A launch with resume=True takes a run over" in str(outcome.results[0, 1])
    assert highest_epochs(store.objects) == {0: 2, 1: 1}
    assert claim_key(0, 1) in store.objects


WISH = f"deltas/00000004/lr.1.00000.0001.3fe0000000000000.{16 * 'f'}"


@pytest.fixture(scope="module")
def ended():
    """The store of a run whose first incarnations have ended."""
    store, training = SimulatedStore(), SimulatedTraining(syncs=3, sizes=(40,), save_every=1)
    simulate(training, Schedule(2), Elastic(2, grace=5.0), store=store)
    return store.objects


@pytest.mark.parametrize("trace", ["none", "inner", "contribution", "hint", "wish", "record"])
def test_each_trace_of_an_earlier_incarnation_counts(ended, trace):
    traces = {"inner/": "inner", "deltas/": "contribution", "commits/": "record"}

    def stays(key):
        if trace == "record" and "/00001." in key:
            return True  # the number of the newest record is known from what it has contributed
        left = all(trace == name for folder, name in traces.items() if key.startswith(folder))
        return left and not key.startswith("claims/00000") and "hint" not in key

    store = store_of({key: data for key, data in ended.items() if stays(key)})
    if trace == "hint":
        store.write(Hint(4, 0, 1, "leave").key, b"")
    if trace == "wish":
        store.write(WISH, b"\n")
    assert _next(store) == (1 if trace == "none" else 2)


def test_there_are_no_gaps_that_hide_a_later_claim(ended):
    store = store_of(ended)
    assert _next(store) == 2
    store.write(claim_key(0, 3), b"whatever")
    store.write(inner_key(0, 6, 7), b"")
    store.write(inner_key(1, 9, 7), b"")
    assert _next(store) == 7
    claims = [key for key in store.objects if key.startswith("claims/00000")]
    assert sorted(claims) == [claim_key(0, epoch) for epoch in range(1, 8)]
    assert store.objects[claim_key(0, 3)] == b"whatever"


def _sleeper(meddle, seconds=20.0, syncs=6):
    """One replica stands still after its third sync, while ``meddle(store, node)`` is called."""
    store, training = SimulatedStore(), SimulatedTraining(syncs=syncs, sizes=(12,), save_every=100)

    prepare = asleep_after(3, lambda node: meddle(store, node), seconds)
    settings = Elastic(1, grace=5.0, topology="sharded")
    return once(training, 1, settings, store=store, prepare=prepare), store


KEY = claim_key(0, 1)


def _other(store):
    """The claim of the same epoch by another process."""
    return sealed_again(KEY, store.objects[KEY], nonce="f" * 16, host="elsewhere", pid=1)


def taken(store, node):
    store.damage(KEY, _other(store))


def taken_at_once(store, node):
    other = _other(store)
    store.remove(KEY)
    node.before("create", lambda key: store.write(KEY, other) if key == KEY else None)


@pytest.mark.parametrize("meddle", [taken, taken_at_once])
def test_another_incarnation_has_taken_the_same_epoch(meddle):
    """Nothing of this one was left when it did, or it does in the very moment."""
    outcome, store = _sleeper(meddle)
    assert isinstance(outcome.results[0, 1], FencedError)
    assert "another incarnation of rank 0" in str(outcome.results[0, 1])
    assert commit_key(4) not in store.objects
    assert b"elsewhere" in store.objects[KEY]


@pytest.mark.parametrize(
    ("how", "seconds"), [("gone", 20.0), ("cut", 20.0), ("flipped", 20.0), ("gone", 0.0)]
)
def test_a_claim_that_was_lost_is_written_again(how, seconds, caplog):
    """At once by one that has slept, and at the latest with the eighth sync."""
    whole = []

    def meddle(store, node):
        data = store.objects[KEY]
        whole.append(data)
        harmed = data[:20] if how == "cut" else data.replace(b'"epoch": 1', b'"epoch": 3')
        store.remove(KEY) if how == "gone" else store.damage(KEY, harmed)

    outcome, store = _sleeper(meddle, seconds, syncs=9)
    assert outcome.errors() == {}
    assert [store.objects[KEY]] == whole
    assert "Writing it again with the same content" in caplog.text

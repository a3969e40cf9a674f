"""Test that what is damaged in the store is written again by whoever has it, or named.

In whole runs: ``test_bits``.
"""

import keys_lab
import pytest
import torch
from damage_lab import flip, late_bit
from strict_lab import Means, Run
from training_lab import identical

from diloco_core import CorruptedObjectError, ObjectStoreAllReduce, ReplicaLostError

HARMS = {"flip": late_bit, "cut": lambda data: data[: len(data) // 3], "empty": lambda data: b""}


@pytest.fixture
def harming(new_store):
    """Return a maker of stores in which at most ``times`` objects are harmed when written."""

    class Harming(new_store):
        def __init__(self, wanted, harm, times=10**9):
            super().__init__()
            self.wanted, self.harm, self.times, self.harmed = wanted, harm, times, []

        def write(self, key, data):
            super().write(key, data)
            if self.wanted(key) and self.times:
                self.times -= 1
                self.harmed.append(key)
                self.damage(key, self.harm(data))

    return Harming


class Leaving(Means):
    """Rank 1 leaves after one mean."""

    def train(self, exchange, until):
        return super().train(exchange, 1 if exchange.rank else until)


@pytest.mark.sampled
@pytest.mark.parametrize("harm", ["cut", "empty"])
def test_a_contribution_that_was_cut_short_is_written_again(harming, harm, caplog):
    store = harming(keys_lab.of("contribution", sync=3, rank=1), HARMS[harm], 1)
    assert identical([*Run(2, store=store).live(), *Run(2).live()])
    assert f"{store.harmed[0]} is gone or cut short. Writing it again" in caplog.text


def test_a_damaged_contribution_is_refused(harming):
    store = harming(keys_lab.of("contribution", sync=3, rank=1), late_bit)
    results = Run(2, store=store).live()
    assert isinstance(results[0], CorruptedObjectError)
    assert store.harmed[0] in str(results[0])
    assert not keys_lab.keys_of(store.objects, "state", sync=3, rank=0)


@pytest.mark.sampled
@pytest.mark.parametrize("harm", HARMS)
def test_a_shard_whose_owner_has_left_is_named(harming, harm):
    store = harming(keys_lab.of("state", sync=1, rank=1), HARMS[harm])
    results = Means(2, store=store).live(until=1)
    assert isinstance(results[1], dict)
    assert isinstance(results[0], CorruptedObjectError)
    assert store.harmed[0] in str(results[0])


@pytest.mark.sampled
@pytest.mark.parametrize(("harm", "fragments"), [("flip", 1), ("cut", 2), ("empty", 1)])
def test_a_shard_whose_owner_is_alive_is_written_again(harming, harm, fragments, caplog):
    store = harming(keys_lab.of("state", sync=3, rank=1), HARMS[harm], 1)
    run = Run(2, fragments, store=store)
    assert identical([*run.live(), *Run(2, fragments).live()])
    assert store.harmed[0] in caplog.text
    assert run.store.differing == []


def test_tensors_that_have_changed_since_are_not_taken_for_the_shard(harming):
    class Changed(Means):
        def train(self, exchange, until):
            with ObjectStoreAllReduce(exchange) as reduce:
                tensor = torch.ones(64)
                reduce.mean([tensor])
                tensor += 1
                reduce.mean([tensor])
            return {"mean": tensor}

    store = harming(keys_lab.of("state", sync=1, rank=1), late_bit)
    results = {type(result) for result in Changed(2, store=store).live(until=2)}
    assert CorruptedObjectError in results
    assert results <= {CorruptedObjectError, ReplicaLostError}


def test_of_one_that_has_left_a_damaged_note_still_ends_the_wait(harming):
    """If rank 0 takes one more mean, it is told at once, although not why."""

    def run(until):
        note = keys_lab.of("note", rank=1)
        return Leaving(2, store=harming(note, lambda data: flip(data, 99))).live(until=until)

    assert identical(run(1)), "nobody needs it any more"
    result, _ = run(2)
    with pytest.raises(ReplicaLostError, match="rank 1 has left or failed after 1 sync"):
        raise result


def test_a_contribution_that_is_gone_is_named(new_store):
    """It is deleted when the sync is decided."""
    run = Means(2, store=new_store())

    def before(process, kind, key):
        if kind == "get" and keys_lab.of("commit")(key):
            for gone in keys_lab.keys_of(run.store.objects, "contribution", rank=0):
                if key in run.store.objects:
                    run.store.remove(gone)

    run.before = before
    results = run.live(until=1)
    assert isinstance(results[1], CorruptedObjectError), results
    assert "00000." in str(results[1])
    assert "is gone" in str(results[1])

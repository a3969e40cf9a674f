"""How an elastic run begins, in virtual time: one replica uploads the initial state, however long that takes."""

import pytest

from diloco_core import Elastic
from diloco_core.testing import Schedule, SimulatedStore, SimulatedTraining, simulate, violations


def uploads(store):
    """The folders of initial states that were ever written."""
    return {key.split("/")[1] for _, key, size in store.history if key.startswith("initial/") and size is not None}


@pytest.mark.parametrize("topology", ["sharded", "gather"])
def test_an_upload_that_takes_longer_than_the_grace_is_waited_for(topology):
    training = SimulatedTraining(syncs=3, sizes=(40,))
    settings = Elastic(2, grace=3.0, topology=topology)
    outcome = simulate(training, Schedule(12, latency=0.4), settings)  # twelve shards, one after the other
    assert violations(outcome, training) == []
    assert len(uploads(outcome.store)) == 1


def test_where_rank_0_does_not_come_one_of_the_others_begins():
    training = SimulatedTraining(syncs=3, sizes=(40,))
    outcome = simulate(training, Schedule(8, starts=[300.0], latency=0.01), Elastic(2, grace=10.0))
    assert violations(outcome, training) == []
    assert len(uploads(outcome.store)) == 1
    written = min(time for time, key, _ in outcome.store.history if key == "manifest.json")
    assert 10.0 <= written < 12.0


def test_an_upload_that_ended_in_the_middle_costs_one_more_grace():
    training = SimulatedTraining(syncs=3, sizes=(40,))
    store = SimulatedStore()
    store.write("initial/0123456789abcdef/000.00000.safetensors", b"x")
    outcome = simulate(training, Schedule(4, starts=[300.0], latency=0.01), Elastic(2, grace=10.0), store=store)
    assert violations(outcome, training) == []
    written = min(time for time, key, _ in outcome.store.history if key == "manifest.json")
    assert 20.0 <= written < 24.0

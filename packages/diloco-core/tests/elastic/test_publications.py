"""A published shard that is damaged before its state is called complete costs nobody anything: all
hold its values.
"""

import logging
from dataclasses import replace

import pytest
from damage_lab import Rotten
from simulated import Schedule, SimulatedTraining, simulate, violations

from diloco_core import Elastic

HARMS = {
    "cut": lambda data: data[:-5],
    "empty": lambda data: b"",
    "its end": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
}


def ended(store, settings, syncs=6, before=None):
    """A run whose replicas may not die; what it trained."""
    salts = {} if before is None else dict(before.salts)
    training = SimulatedTraining(syncs=syncs, sizes=(40,), sync_every=2, salts=salts)
    outcome = simulate(
        training, Schedule(2), settings, store=store, most_incarnations=1, sync_timeout=100.0
    )
    return training, outcome


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize(
    "which", [2, 10, 11]
)  # the last ones when the replicas leave: nobody comes after them
def test_of_a_gathered_state(which, harm, caplog):
    settings = Elastic(2, grace=5.0, topology="gather", publish_every=1)
    store = Rotten("state/", which, HARMS[harm])
    with caplog.at_level(logging.ERROR):
        training, outcome = ended(store, settings)
    assert store.harmed
    assert outcome.errors() == {}
    assert violations(outcome, training) == []
    if store.harmed.startswith("state/00000006/"):
        assert f"writing {store.harmed} again with the same content" in caplog.text
    else:
        assert "No replica will begin from this state; a later one takes its place" in caplog.text
    longer, outcome = ended(store, replace(settings, resume=True), 8, training)
    assert outcome.errors() == {}
    assert violations(outcome, longer) == []

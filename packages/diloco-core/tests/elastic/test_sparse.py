"""Elastic runs with a sparse codec: what is lost, late or made again is the mean of those who sent
a value, each time.
"""

import random

import pytest
from faults_lab import harmful
from simulated import Schedule, SimulatedTraining, simulate, violations

from diloco_core import Elastic
from diloco_core._arithmetic import _reduction
from diloco_core._outer._fragment import Fragment

OPTIONS = {
    "plain": {"sizes": (300, 40)},
    "weighed": {"sizes": (300, 40), "weight": "tokens", "save_every": 1},
    "clipped": {"sizes": (300,), "clip": True},
    "delayed": {"sizes": (300,), "delay": 1, "alpha": 0.5, "sync_every": 3},
    "encoded": {"sizes": (300,), "state_codec": "int8", "full_state_every": 2},
}


def wrong(number, topology, **options):
    chance = random.Random(number)
    training = SimulatedTraining(syncs=4, codec="topk64", error_feedback=0.95, **options)
    faults = harmful(chance, 5)
    schedule = Schedule(3, seed=number, faults=faults, restart_after=2.0, latency=0.1)
    outcome = simulate(training, schedule, Elastic(2, grace=8.0, topology=topology))
    return violations(outcome, training)


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize(
    ("topology", "name"),
    [("sharded", name) for name in OPTIONS] + [("gather", n) for n in OPTIONS if n != "encoded"],
)
def test_every_state_is_that_of_the_log(topology, name, number):
    assert wrong(number, topology, **OPTIONS[name]) == []


@pytest.mark.parametrize("topology", ["sharded", "gather"])
def test_the_mean_of_all_is_caught(topology, monkeypatch):
    def summed(job, chunk, out, scratch, count, shares, **_):
        return _reduction._Mean(job, chunk, out, scratch, count)

    monkeypatch.setattr(_reduction, "_mean_of", summed)
    assert "off what the log says" in "".join(wrong(0, topology, **OPTIONS["plain"]))


@pytest.mark.parametrize("topology", ["sharded", "gather"])
def test_a_contribution_of_what_was_not_learned_is_caught(topology, monkeypatch):
    """What replicas read of a contribution is believed only if it can be what was learned."""
    learned = Fragment._contribution

    def doubled(self, *arguments):
        return learned(self, *arguments).mul_(2)

    monkeypatch.setattr(Fragment, "_contribution", doubled)
    assert "off what the log says" in "".join(wrong(0, topology, **OPTIONS["plain"]))

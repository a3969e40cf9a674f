"""Elastic runs whose mean is clipped, trimmed or of a sparse codec, whatever goes wrong."""

import random

import pytest
from damage_lab import Rotten, flip
from faults_lab import harmful
from simulated import Fault, Schedule, SimulatedTraining, flawless, simulate, violations

from diloco_core import CorruptedObjectError, Elastic
from diloco_core._arithmetic import _reduction
from diloco_core._outer._fragment import Fragment

pytestmark = pytest.mark.sampled


def least(training):
    reports = [report for each in training.reports.values() for report in each]
    return min(each.least for report in reports for each in report.clipped)


@pytest.mark.parametrize("kind", ["kill after", "zombie", "rot", "delay"])
@pytest.mark.parametrize(
    ("topology", "options"),
    [
        ("sharded", {"clip": True}),
        ("gather", {"clip": True, "weight": "steps"}),
        (
            "sharded",
            {"clip": True, "codec": "int8", "error_feedback": True, "delay": 1, "sync_every": 4},
        ),
        ("sharded", {"trim": 1}),
        ("gather", {"trim": 1}),
    ],
    ids=["clipped", "gather-clipped-weighed", "clipped-coded", "trimmed", "gather-trimmed"],
)
def test_every_state_is_that_of_the_log(topology, options, kind):
    size = 3 + options.get("trim", 0)
    training = SimulatedTraining(size, **options)
    faults = [Fault(1, 1, 60, kind, 20.0), Fault(size - 1, 1, 75, "flip")]
    schedule = Schedule(size, faults=faults, restart_after=5.0, latency=0.01)
    flawless(training, schedule, Elastic(size - 1, grace=2.0, topology=topology))
    assert training.trim or least(training) < 1


@pytest.mark.parametrize("topology", ["sharded", "gather"])
@pytest.mark.parametrize("which", [0, 3])
def test_norms_that_are_damaged_at_rest_decide_nothing(topology, which):
    training = SimulatedTraining(4, clip=True)
    first_norm = 8 * 8 + 3  # after the header

    def harm(data):
        return flip(data, 8 * int.from_bytes(data[:8], "little") + first_norm)

    store = Rotten("deltas/", which, harm)
    settings = Elastic(2, grace=2.0, topology=topology)
    outcome = simulate(training, 2, settings, store=store, most_incarnations=2)
    assert store.harmed
    errors = outcome.errors().values()
    assert {type(error) for error in errors} <= {CorruptedObjectError}
    assert all("section norms" in str(error) for error in errors)
    wrong = violations(outcome, training)
    assert [what for what in wrong if " raised " not in what and "not every rank" not in what] == []


SPARSE = {
    "plain": {"sizes": (300, 40)},
    "weighed": {"sizes": (300, 40), "weight": "tokens", "save_every": 1},
    "clipped": {"sizes": (300,), "clip": True},
    "delayed": {"sizes": (300,), "delay": 1, "alpha": 0.5, "sync_every": 3},
    "encoded": {"sizes": (300,), "state_codec": "int8", "full_state_every": 2},
}


def wrong_sparse(number, topology, name):
    chance = random.Random(number)
    training = SimulatedTraining(4, codec="topk64", error_feedback=0.95, **SPARSE[name])
    faults = harmful(chance, 5)
    schedule = Schedule(3, seed=number, faults=faults, restart_after=2.0, latency=0.1)
    outcome = simulate(training, schedule, Elastic(2, grace=8.0, topology=topology))
    return violations(outcome, training)


@pytest.mark.parametrize("number", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
@pytest.mark.parametrize(
    ("topology", "name"),
    [("sharded", name) for name in SPARSE] + [("gather", n) for n in SPARSE if n != "encoded"],
)
def test_sparse_means_are_of_those_who_sent_a_value(topology, name, number):
    assert wrong_sparse(number, topology, name) == []


def the_mean_of_all(monkeypatch):
    def summed(job, chunk, out, scratch, count, shares, **_):
        return _reduction._Mean(job, chunk, out, scratch, count)

    monkeypatch.setattr(_reduction, "_mean_of", summed)


def what_was_not_learned(monkeypatch):
    """Double every contribution, so that it holds what was not learned."""
    learned = Fragment._contribution
    monkeypatch.setattr(Fragment, "_contribution", lambda *given: learned(*given).mul_(2))


@pytest.mark.parametrize("topology", ["sharded", "gather"])
@pytest.mark.parametrize("mutate", [the_mean_of_all, what_was_not_learned])
def test_a_wrong_variant_is_caught(topology, mutate, monkeypatch):
    mutate(monkeypatch)
    assert "off what the log says" in "".join(wrong_sparse(0, topology, "plain"))

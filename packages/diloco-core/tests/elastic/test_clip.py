"""Elastic runs with clipping: what is lost, late, damaged or made again is clipped the same way."""

import pytest
from damage_lab import Rotten, flip
from simulated import Fault, Schedule, SimulatedTraining, simulate, violations

from diloco_core import CorruptedObjectError, Elastic, Seconds
from diloco_core._wire._safetensors import header_size


@pytest.mark.parametrize("kind", ["kill after", "zombie", "rot", "delay"])
@pytest.mark.parametrize(
    ("topology", "options"),
    [
        ("sharded", {}),
        ("gather", {"weight": "steps"}),
        ("sharded", {"codec": "int8", "error_feedback": True, "delay": 1, "sync_every": 4}),
    ],
    ids=["sharded", "gather-weighed", "sharded-coded"],
)
def test_every_state_is_that_of_the_log(topology, options, kind):
    training = SimulatedTraining(3, clip=True, **options)
    faults = [Fault(1, 1, 60, kind, 20.0), Fault(2, 1, 75, "flip")]
    schedule = Schedule(3, faults=faults, restart_after=5.0, latency=0.01)
    outcome = simulate(training, schedule, Elastic(2, grace=2.0, topology=topology))
    assert violations(outcome, training) == []
    clipped = [
        each.least for reports in training.reports.values() for r in reports for each in r.clipped
    ]
    assert min(clipped) < 1


def first_norm(data):
    """The same contribution but for one bit of its first norm."""
    return flip(data, 8 * header_size(data) + 3)


@pytest.mark.parametrize("topology", ["sharded", "gather"])
@pytest.mark.parametrize("which", [0, 3])
def test_norms_that_are_damaged_at_rest_decide_nothing(topology, which):
    training = SimulatedTraining(4, clip=True)
    store = Rotten("deltas/", which, first_norm)
    settings = Elastic(2, grace=2.0, topology=topology)
    outcome = simulate(
        training, Schedule(2, latency=0.01), settings, store=store, most_incarnations=2
    )
    assert store.harmed
    errors = outcome.errors()
    assert {type(error) for error in errors.values()} <= {CorruptedObjectError}
    assert all("section norms" in str(error) for error in errors.values())
    wrong = violations(outcome, training)
    assert [what for what in wrong if " raised " not in what and "not every rank" not in what] == []


def test_windows_of_time_are_clipped_and_weighed_by_their_steps():
    """Who takes three times as many steps learns about as much more, which is scaled down before it
    is weighed.
    """
    training = SimulatedTraining(4, (12,), Seconds(20), paces=(1.0, 3.0), clip=True)
    outcome = simulate(training, Schedule(2, latency=0.01), Elastic(2, grace=9.0))
    assert violations(outcome, training) == []
    reports = [report for each in training.reports.values() for report in each]
    assert all(report.weights for report in reports)
    assert min(each.least for report in reports for each in report.clipped) < 1

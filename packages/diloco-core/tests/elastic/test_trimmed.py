"""Elastic runs with a trimmed mean: what is lost, late or made again is trimmed in the same way."""

import pytest
from simulated import Fault, Schedule, SimulatedTraining, simulate, violations

from diloco_core import Elastic


@pytest.mark.parametrize("kind", ["kill after", "zombie", "rot", "delay"])
@pytest.mark.parametrize("topology", ["sharded", "gather"])
def test_every_state_is_that_of_the_log(topology, kind):
    training = SimulatedTraining(4, trim=1)
    faults = [Fault(1, 1, 60, kind, 20.0), Fault(3, 1, 75, "flip")]
    schedule = Schedule(4, faults=faults, restart_after=5.0, latency=0.01)
    outcome = simulate(training, schedule, Elastic(3, grace=2.0, topology=topology))
    assert violations(outcome, training) == []
    members = {r.members for reports in training.reports.values() for r in reports if r.committed}
    assert members <= {3, 4}

"""Elastic runs whose syncs go on while the replicas train."""

import pytest
import torch
from simulated import Schedule, SimulatedTraining, flawless, once, simulate

from diloco_core import DiLoCo, Elastic


def run(schedule, elastic, **training):
    """A simulated run in which nothing went wrong: its outcome and its training."""
    trained = SimulatedTraining(**{"sync_every": 6, "delay": 1, "alpha": 0.5, **training})
    outcome = flawless(trained, schedule, elastic)
    return outcome, trained


def fates(training, rank=1, incarnation=1):
    return [report.contribution for report in training.reports[rank, incarnation]]


@pytest.mark.sampled
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("late", "fate"), [("carry", "carried"), ("drop", "dropped")])
def test_who_is_late_keeps_its_progress_or_drops_it(late, fate, alpha):
    elastic, pauses = Elastic(1, grace=2.0, late=late), {(1, 1): 20.0}
    _, training = run(Schedule(2, latency=0.01), elastic, alpha=alpha, pauses=pauses)
    assert fate in fates(training)


def test_who_was_away_for_long_reloads_behind_its_training(publishing):
    """Its state is gone: all fragments take the published one, also those that were not sent."""
    settings = publishing(1, grace=2.0, retention=1)
    _, training = run(Schedule(2, latency=0.01), settings, syncs=20, pauses={(1, 2): 50.0})
    assert any(report.reloaded for report in training.reports[1, 1])


@pytest.mark.parametrize("steps", [4, 5])
def test_nobody_waits_long_for_those_who_have_left(steps):
    """The last one has a sync under way that nobody else will ever contribute to."""
    seconds, ended = {}, {}

    def train(node):
        model = torch.nn.ParameterList([torch.zeros(4)])
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        with DiLoCo(model, inner, node.exchange, sync_every=3, delay=2) as outer:
            for _ in range(3 if node.rank else steps):
                node.sleep(1.0)
                model[0].grad = torch.ones(4)
                inner.step()
            seconds[node.rank] = node.connection.clock()
        ended[node.rank] = node.connection.clock() - seconds[node.rank]
        return outer.committed

    outcome = once(train, 2, Elastic(2, grace=10.0))
    assert outcome.errors() == {}
    assert set(outcome.results.values()) == {1}
    assert ended[0] < 25.0, "two graces, and not the 600 s of sync_timeout"


@pytest.mark.parametrize("fragments", [1, 2])
def test_a_new_incarnation_goes_on_after_uncounted_steps(fragments):
    """It is saved when a sync is adopted, with the steps that were taken while that was under way.

    They are not repeated.
    """
    begun = []

    def train(node):
        model = torch.nn.ParameterList([torch.zeros(4) for _ in range(fragments)])
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        options = {"sync_every": 3 * fragments, "fragments": fragments, "save_inner_every": 1}
        with DiLoCo(model, inner, node.exchange, delay=1, **options) as outer:
            begun.append((outer.inner_steps, outer.batches_to_skip))
            while outer.committed < 4:
                node.sleep(1.0)
                for tensor in model:
                    tensor.grad = torch.ones(4)
                inner.step()
                if node.incarnation == 1 and outer.inner_steps == 7:
                    raise KeyError("the end")
        return outer.inner_steps

    outcome = simulate(train, Schedule(1, latency=0.001), Elastic(1, grace=2.0))
    assert begun == [(0, 0), (6, 0)]
    assert outcome.results[1 - 1, 2] == 12

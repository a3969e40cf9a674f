"""Error feedback while replicas are late or die: nothing is sent twice, and losses are said."""

import logging

import pytest
from simulated import Fault, Schedule, SimulatedTraining, simulate, violations

from diloco_core import Elastic
from diloco_core._outer._residual import Residual


def run(schedule, elastic, **training):
    """A simulated run with error feedback: its training, and what was wrong."""
    trained = SimulatedTraining(
        **{"sync_every": 6, "codec": "e2m1", "error_feedback": True, "save_every": 1, **training}
    )
    outcome = simulate(trained, schedule, elastic)
    return trained, violations(outcome, trained)


def fates(training, rank=1, incarnation=1):
    return [report.contribution for report in training.reports[rank, incarnation]]


LATE = Schedule(2, latency=0.01)


def run_late(late, **training):
    """Rank 1 is late once, in the middle of the run."""
    return run(LATE, Elastic(1, grace=2.0, late=late), pauses={(1, 8): 20.0}, syncs=12, **training)


@pytest.mark.sampled
@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize(("late", "fate"), [("carry", "carried"), ("drop", "dropped")])
def test_who_is_late_keeps_its_residual(late, fate, delay):
    training, wrong = run_late(late, delay=delay)
    assert wrong == []
    assert fate in fates(training)
    assert not training.feedback.said


def run_killed(operation=61, **training):
    """Rank 1 is killed after one of its requests, and comes back."""
    faults = [Fault(1, 1, operation, "kill after")]
    schedule = Schedule(2, faults=faults, latency=0.01, restart_after=3.0)
    outcome = run(schedule, Elastic(1, grace=2.0), syncs=12, sizes=(40,), sync_every=2, **training)
    assert (1, 2) in outcome[0].reports
    return outcome


def test_a_new_incarnation_goes_on_with_what_was_saved():
    training, wrong = run_killed()
    assert wrong == []
    assert not any(incarnation == 2 for _, incarnation, _ in training.feedback.said)
    first = min(
        (key for key in training.feedback.before if key[:2] == (1, 2)), key=lambda key: key[3]
    )
    assert training.feedback.before[first].any()


def test_what_was_not_saved_is_lost_and_said(caplog):
    caplog.set_level(logging.WARNING)
    training, wrong = run_killed(70, save_every=10)
    assert wrong == []
    assert (1, 2, 0) in training.feedback.said
    assert "rank 1: error feedback of fragment 0 starts again from zero after sync" in caplog.text


@pytest.mark.parametrize("delay", [0, 1])
def test_who_was_away_for_long_and_reloads_says_what_is_lost(delay):
    elastic = Elastic(1, grace=2.0, retention=1, publish_every=1)
    training, wrong = run(LATE, elastic, syncs=20, delay=delay, pauses={(1, 13): 80.0})
    assert wrong == []
    assert any(report.reloaded for report in training.reports[1, 1])


# --- wrong variants, each caught by one of the runs above ---


def updated_though_not_counted(monkeypatch):
    settle = Residual.settle

    def mutant(self, fate, position):
        if fate in {"dropped", "carried"} and self._offered:
            self.values, self._offered = self._offered, []
        return settle(self, fate, position)

    monkeypatch.setattr(Residual, "settle", mutant)


def the_tag_is_not_looked_at(monkeypatch):
    monkeypatch.setattr(Residual, "move", lambda self, position: False)


def not_restored(monkeypatch):
    monkeypatch.setattr(Residual, "load", lambda self, values, tag: setattr(self, "tag", tag))


def what_is_kept_is_never_sent(monkeypatch):
    offer = Residual.offer

    def mutant(self, learned, stop):
        kept, self.values = self.values, []
        offer(self, learned, stop)
        self.values = kept

    monkeypatch.setattr(Residual, "offer", mutant)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("mutate", "act"),
    [
        (updated_though_not_counted, lambda: run_late("drop")),
        (updated_though_not_counted, lambda: run_late("carry")),
        (the_tag_is_not_looked_at, lambda: run_killed(84, save_every=3)),
        (not_restored, run_killed),
        (what_is_kept_is_never_sent, lambda: run_late("carry")),
    ],
    ids=range(5),
)
def test_a_wrong_variant_is_caught(mutate, act, monkeypatch):
    assert act()[1] == []
    mutate(monkeypatch)
    assert any("residual" in what or "off what" in what for what in act()[1])

"""Gather: a replica that computes other values than most decides nothing, and heals or stops."""

import logging

import pytest
from members_lab import gathering, members_in, reloads
from simulated import Schedule, SimulatedStore, SimulatedTraining, once, simulate, violations

from diloco_core import DivergedError, Elastic
from diloco_core._run._records._keys import Delta, deltas


def first_of(*syncs):
    """Return a test whether a sync is one of these, for the first time."""
    left = set(syncs)
    return lambda epoch, sync: sync in left and not left.remove(sync)


@pytest.mark.parametrize("syncs", [(2,), (2, 5)])
def test_nobody_waits_for_it_and_it_reloads(rounds_otherwise, syncs, caplog):
    rounds_otherwise(1, first_of(*syncs))
    training = SimulatedTraining(syncs=8, sizes=(400,))
    outcome = once(training, Schedule(3), gathering(grace=100.0))
    assert outcome.errors() == {}
    assert reloads(training, 1) == len(syncs)
    assert members_in(outcome.store)[2] == [0, 2]
    assert outcome.seconds < 50
    wrong = {what.split(",")[0] for what in violations(outcome, training)}
    assert wrong == {f"after sync {sync}" for sync in syncs}
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == len(syncs)
    message = "rank 1: the state of fragment 0 after sync 2 is not the one that other replicas hold"
    assert message in errors[0]


def test_it_does_not_decide_by_itself_though_one_is_a_quorum(rounds_otherwise):
    # It contributes last, so that it is the first to see that everybody has.
    rounds_otherwise(1, first_of(2))
    training = SimulatedTraining(syncs=6, sizes=(400,), pauses={(1, 4): 3.0})
    outcome = simulate(training, Schedule(3), gathering(1, grace=100.0))
    assert outcome.errors() == {}
    assert members_in(outcome.store)[2] == [0, 2]
    wrong = violations(outcome, training)
    assert wrong
    assert all(what.startswith("after sync 2, ") for what in wrong)


def test_one_that_always_differs_stops_and_says_what_to_do(rounds_otherwise):
    rounds_otherwise(1, lambda epoch, sync: sync > 1)
    outcome = once(SimulatedTraining(syncs=8, sizes=(40,)), Schedule(3), gathering())
    error = outcome.results[1, 1]
    assert isinstance(error, DivergedError)
    assert "topology='sharded'" in str(error)
    assert all(not isinstance(outcome.results[rank, 1], BaseException) for rank in (0, 2))


def test_one_that_finds_out_by_the_log_alone_stops_before_it_trains(rounds_otherwise):
    rounds_otherwise(1, lambda epoch, sync: epoch == 2 and sync == 1)
    training, store = SimulatedTraining(syncs=6, sizes=(400,)), SimulatedStore()
    made = set()

    def noting(node):
        node.before("put", lambda key: made.add(Delta.parse(key)))
        if (node.rank, node.incarnation) == (1, 1):
            node.fault("put", deltas(5), "kill before")

    settings, options = gathering(grace=10.0, publish_every=9), {"most_incarnations": 2}
    outcome = simulate(training, Schedule(3), settings, store=store, prepare=noting, **options)
    assert isinstance(outcome.results[1, 2], DivergedError)
    assert (1, 1) in {(delta.rank, delta.epoch) for delta in made - {None}}
    assert (1, 2) not in {(delta.rank, delta.epoch) for delta in made - {None}}
    assert training.reports[1, 2] == []
    assert members_in(store)[5] == [0, 2]


@pytest.mark.parametrize("quorum", [1, 2])
def test_of_two_that_differ_the_wrong_one_does_not_win(rounds_otherwise, quorum):
    """Both reload what is published, and the lower rank is not right for being lower."""
    rounds_otherwise(0, first_of(2))
    training = SimulatedTraining(syncs=6, sizes=(40,))
    outcome = simulate(training, 2, gathering(quorum, grace=5.0))
    assert outcome.errors() == {}
    assert {what.split(",")[0] for what in violations(outcome, training)} <= {"after sync 2"}


def test_who_computes_other_values_mends_nothing(rounds_otherwise):
    """A damaged shard comes out otherwise: this machine rounds differently."""
    first, store = SimulatedTraining(syncs=3, sizes=(40,)), SimulatedStore()
    simulate(first, 2, gathering(grace=5.0), store=store)
    store.damage("state/00000003/000.00001.safetensors", b"")

    def decided():
        return {k: data for k, data in store.objects.items() if k.startswith(("state/", "commits"))}

    before = decided()
    for rank in (0, 1):
        rounds_otherwise(rank, lambda epoch, sync: sync == 3)
    again = SimulatedTraining(syncs=4, sizes=(40,), salts=dict(first.salts))
    outcome = once(again, 2, gathering(grace=5.0), store=store, limit=500.0)  # fmt: skip
    errors = list(outcome.errors().values())
    assert len(errors) == 2
    assert all("different kinds of processors round differently" in str(error) for error in errors)
    assert decided() == before


def test_sharded_different_rounding_does_not_matter(rounds_otherwise):
    # Every shard is computed once, and all read the same bytes.
    rounds_otherwise(1, lambda epoch, sync: True)
    training = SimulatedTraining(syncs=6, sizes=(48,))
    outcome = simulate(training, Schedule(3), Elastic(2, grace=20.0, topology="sharded"))
    assert all("off what the log says" in what for what in violations(outcome, training))

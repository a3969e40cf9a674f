"""Gather: a replica that computes other values than most decides nothing, holds nobody up and
learns nothing in vain.
"""

import pytest
from simulated import Fault, Schedule, SimulatedStore, SimulatedTraining, simulate, violations

from diloco_core import DivergedError, Elastic
from diloco_core._run._records._keys import Delta, commit_key, deltas
from diloco_core._run._records._records import Commit
from diloco_core._run._sync._compute import Computation


@pytest.fixture
def spoil(monkeypatch):
    """Makes rank 1 compute other values where ``when(epoch, sync)`` is true."""

    def spoil_when(when):
        update = Computation._update

        def other(self, batch, inputs):
            update(self, batch, inputs)
            if (
                self._incarnation.rank == 1
                and 0 in batch
                and when(self._incarnation.epoch, self._commit.sync)
            ):
                self._job.copy[0][3] += 2**-10

        monkeypatch.setattr(Computation, "_update", other)

    return spoil_when


def _members(store, sync):
    return [
        member.rank
        for member in Commit.from_json(store.objects[commit_key(sync)], sync, "").members
    ]


@pytest.fixture
def once():
    seen = []
    return lambda epoch, sync: sync == 2 and not seen and not seen.append(sync)


def test_nobody_waits_for_it(spoil, once):
    spoil(once)
    training = SimulatedTraining(syncs=6, sizes=(400,))
    elastic = Elastic(2, grace=100.0, topology="gather", publish_every=1)
    outcome = simulate(training, Schedule(3), elastic)
    assert outcome.errors() == {}
    assert [report.reloaded for report in training.reports[1, 1]].count(True) == 1
    assert _members(outcome.store, 3) == [0, 2]
    assert outcome.seconds < 50


def test_it_does_not_decide_by_itself_though_one_is_a_quorum(spoil, once):
    # It contributes last, so that it is the first to see that everybody has.
    spoil(once)
    training = SimulatedTraining(syncs=6, sizes=(400,), pauses={(1, 4): 3.0})
    elastic = Elastic(1, grace=100.0, topology="gather", publish_every=1)
    outcome = simulate(training, Schedule(3), elastic)
    assert outcome.errors() == {}
    assert _members(outcome.store, 3) == [0, 2]
    wrong = violations(outcome, training)
    assert wrong
    assert all(what.startswith("after sync 2, ") for what in wrong)


def test_one_that_finds_out_by_the_log_alone_stops_before_it_trains(spoil):
    spoil(lambda epoch, sync: epoch == 2 and sync == 1)
    training, store = SimulatedTraining(syncs=6, sizes=(400,)), SimulatedStore()
    made = set()

    def train(node):
        put = node.connection.put

        def noting(key, parts):
            made.add(Delta.parse(key))
            if key.startswith(deltas(5)) and (node.rank, node.incarnation) == (1, 1):
                number = node.connection.operations + 1
                node.connection._faults[number] = Fault(1, 1, number, "kill before")
            return put(key, parts)

        node.connection.put = noting
        return training(node)

    elastic = Elastic(2, grace=10.0, topology="gather", publish_every=9)
    outcome = simulate(train, Schedule(3), elastic, store=store, most_incarnations=2)
    assert isinstance(outcome.results[1, 2], DivergedError)
    assert "topology='sharded'" in str(outcome.results[1, 2])
    assert (1, 1) in {(delta.rank, delta.epoch) for delta in made - {None}}
    assert (1, 2) not in {(delta.rank, delta.epoch) for delta in made - {None}}
    assert training.reports[1, 2] == []
    assert _members(store, 6) == [0, 2]

"""A replica whose state is not that of the others finds out, says so, and heals or stops."""

import logging

import pytest
from simulated import Schedule, SimulatedTraining, simulate, violations

from diloco_core import DivergedError, Elastic
from diloco_core._run._sync._compute import Computation


def _spoil(monkeypatch, when):
    """Rank 1 computes other values in the syncs for which ``when`` is true."""
    update = Computation._update

    def other(self, batch, inputs):
        update(self, batch, inputs)
        if self._incarnation.rank == 1 and 0 in batch and when(self._commit.sync):
            self._job.copy[0][3] += 2**-10

    monkeypatch.setattr(Computation, "_update", other)


@pytest.mark.parametrize("topology", ["sharded", "gather"])
def test_memory_that_changed_is_noticed_before_anything_is_sent(caplog, topology):
    class Flipped(SimulatedTraining):
        def gradient(self, rank, incarnation, step, size):
            if rank == 1 and step == 4 and not self.pauses:
                self.pauses[9, 9] = 0.0  # once
                self.states[2][0][2][0]
                copies[1][0][7] += 0.5
            return SimulatedTraining.gradient(rank, incarnation, step, size)

        def __call__(self, node):
            join = node.exchange.restore

            def restore(jobs, **options):
                copies[node.rank] = jobs[0].copy
                return join(jobs, **options)

            node.exchange.restore = restore
            return super().__call__(node)

    copies = {}
    training = Flipped(syncs=6, sizes=(40,))
    with caplog.at_level(logging.ERROR, "diloco_core"):
        outcome = simulate(
            training,
            Schedule(3),
            Elastic(
                2, grace=20.0, topology=topology, publish_every=1 if topology == "gather" else None
            ),
        )
    assert violations(outcome, training) == []
    (message,) = [
        record.getMessage() for record in caplog.records if record.levelno == logging.ERROR
    ]
    assert (
        "rank 1: the global copy of fragment 0 has changed in memory since sync 2 (shard 1"
        in message
    )
    assert [report.reloaded for report in training.reports[1, 1]].count(True) == 1
    assert not any(report.reloaded for rank in (0, 2) for report in training.reports[rank, 1])


def test_gather_a_minority_reloads_and_goes_on(monkeypatch, caplog):
    seen = []
    _spoil(monkeypatch, lambda sync: sync == 2 and not seen and not seen.append(sync))
    training = SimulatedTraining(syncs=6, sizes=(40,))
    outcome = simulate(
        training, Schedule(3), Elastic(2, grace=20.0, topology="gather", publish_every=1)
    )
    wrong = violations(outcome, training)
    assert wrong
    assert all(what.startswith("after sync 2, ") for what in wrong)
    messages = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(messages) == 1
    assert (
        "rank 1: the state of fragment 0 after sync 2 is not the one that other replicas hold"
        in messages[0]
    )
    assert any(report.reloaded for report in training.reports[1, 1])
    assert outcome.errors() == {}


def test_gather_a_replica_that_always_differs_stops_and_says_what_to_do(monkeypatch):
    _spoil(monkeypatch, lambda sync: sync > 1)
    training = SimulatedTraining(syncs=8, sizes=(40,))
    outcome = simulate(
        training,
        Schedule(3),
        Elastic(2, grace=5.0, topology="gather", publish_every=1),
        most_incarnations=1,
    )
    error = outcome.results[1, 1]
    assert isinstance(error, DivergedError)
    assert "topology='sharded'" in str(error)
    assert all(not isinstance(outcome.results[rank, 1], BaseException) for rank in (0, 2))


def test_sharded_different_rounding_does_not_matter(monkeypatch):
    # Every shard is computed once, and all read the same bytes.
    _spoil(monkeypatch, lambda sync: True)
    training = SimulatedTraining(syncs=6, sizes=(48,))
    outcome = simulate(training, Schedule(3), Elastic(2, grace=20.0, topology="sharded"))
    assert [
        what for what in violations(outcome, training) if "off what the log says" not in what
    ] == []


def test_memory_that_is_bad_for_good_ends_a_replica():
    class Bad(SimulatedTraining):
        def __call__(self, node):
            restore = node.exchange.restore

            def remember(jobs, **options):
                copies[node.rank] = jobs[0].copy
                return restore(jobs, **options)

            node.exchange.restore = remember
            return super().__call__(node)

        def gradient(self, rank, incarnation, step, size):
            if rank == 1 and step >= 4:
                copies[1][0][7] += 0.5
            return SimulatedTraining.gradient(rank, incarnation, step, size)

    copies = {}
    training = Bad(syncs=6, sizes=(40,))
    outcome = simulate(training, Schedule(3), Elastic(2, grace=20.0), most_incarnations=1)
    assert isinstance(outcome.results[1, 1], DivergedError)
    assert "memory is faulty" in str(outcome.results[1, 1])
    assert (outcome.results[0, 1], outcome.results[2, 1]) == (6, 6)
    assert [what for what in violations(outcome, training) if what.startswith("after sync")] == []


def test_gather_a_minority_may_heal_more_than_once(monkeypatch):
    left = {2, 5}
    _spoil(monkeypatch, lambda sync: sync in left and not left.remove(sync))
    training = SimulatedTraining(syncs=8, sizes=(40,))
    settings = Elastic(2, grace=20.0, topology="gather", publish_every=1)
    outcome = simulate(training, Schedule(3), settings, most_incarnations=1)
    assert outcome.errors() == {}
    assert [report.reloaded for report in training.reports[1, 1]].count(True) == 2


class _OuterFlips(SimulatedTraining):
    """A bit flips in what rank 1 keeps of the outer optimizer, after its sync 3."""

    def __call__(self, node):
        restore = node.exchange.restore

        def remember(jobs, **options):
            self.pauses[node.rank, node.incarnation, "jobs"] = jobs
            return restore(jobs, **options)

        node.exchange.restore = remember
        return super().__call__(node)

    def gradient(self, rank, incarnation, step, size):
        if (rank, incarnation, step) == (1, 1, 6):
            (job,) = self.pauses[rank, incarnation, "jobs"]
            for shard in range(job.layout.shards):
                for chunk in job.layout.chunks(shard, 2**20):
                    job.outer_state(chunk)["momentum_buffer"][0] += 0.5
        return SimulatedTraining.gradient(rank, incarnation, step, size)


def test_gather_outer_state_that_one_replica_alone_holds_is_not_gone_on_from(caplog):
    training = _OuterFlips(syncs=8, sizes=(40,))
    settings = Elastic(2, grace=20.0, topology="gather", publish_every=1)
    outcome = simulate(training, Schedule(3), settings, most_incarnations=1)
    assert outcome.errors() == {}
    assert {what.split(",")[0] for what in violations(outcome, training)} <= {"after sync 4"}
    assert (
        "the outer optimizer's tensors in simulated://run/state/00000003/000.00001.safetensors "
        "differ" in caplog.text
    )
    assert "state/00000003/000.done.json" not in outcome.store.decided | outcome.store.objects


@pytest.mark.parametrize("first", [0, 1])
def test_gather_outer_state_is_compared_when_a_run_ends(first, caplog):
    """The first that leaves publishes the state that the run ends with; the others compare it."""
    training = _OuterFlips(syncs=3, sizes=(40,))

    def train(node):
        leave = node.exchange.leave

        def late():
            if not node.exchange.ended:
                node.sleep(0.0 if node.rank == first else 5.0 + node.rank)
                if node.rank == 1:
                    training.gradient(1, 1, 6, 40)
            leave()

        node.exchange.leave = late
        training(node)

    outcome = simulate(
        train,
        Schedule(3),
        Elastic(3, grace=20.0, topology="gather", publish_every=8),
        most_incarnations=1,
    )
    assert outcome.errors() == {}
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert [message[:7] for message in errors] == (
        ["rank 1:"] if first == 0 else ["rank 0:", "rank 2:"]
    )
    assert all(
        "state/00000003/000.done.json describes is not what this replica has computed" in message
        for message in errors
    )


@pytest.mark.parametrize("chunk_bytes", [32, 2**20])
def test_sharded_outer_state_that_changed_in_memory_is_read_again(caplog, chunk_bytes):
    """Nobody else computes that shard, so nobody else could notice."""

    class Flips(_OuterFlips):
        def gradient(self, rank, incarnation, step, size):
            if (rank, incarnation, step) == (1, 1, 6):
                (job,) = self.pauses[rank, incarnation, "jobs"]
                chunk = list(job.layout.chunks(1, chunk_bytes))[-1]
                job.outer_state(chunk)["momentum_buffer"][-1] += 2**-10
            return SimulatedTraining.gradient(rank, incarnation, step, size)

    training = Flips(syncs=6, sizes=(40,))
    settings = Elastic(2, grace=20.0, topology="sharded")
    outcome = simulate(
        training, Schedule(3), settings, most_incarnations=1, chunk_bytes=chunk_bytes
    )
    assert violations(outcome, training) == []
    (message,) = [
        record.getMessage() for record in caplog.records if record.levelno == logging.ERROR
    ]
    assert (
        "rank 1: the outer optimizer's state of shard 1 of fragment 0 has changed in memory since "
        "sync 3" in message
    )

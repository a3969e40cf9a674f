"""A replica whose memory changes by itself finds out in gather, says so, and heals."""

import logging

import pytest
from members_lab import gathering, reloads
from simulated import Schedule, SimulatedTraining, once, violations


class Remembering(SimulatedTraining):
    """Calls ``flip(jobs)`` with the jobs of rank 1 when its first incarnation takes some steps."""

    def __init__(self, *given, flip, steps, **options):
        super().__init__(*given, **options)
        self.jobs, self.flip, self.steps_of_flips = {}, flip, set(steps)

    def __call__(self, node):
        restore, put = node.exchange.restore, node.connection.put

        def remember(jobs, **options):
            self.jobs[node.rank] = jobs
            return restore(jobs, **options)

        def put_and_flip(key, parts):
            size = put(key, parts)
            if node.rank == 1 and key.startswith("deltas/00000004/00001.") and self.late:
                self.flip(self.jobs[1])
            return size

        node.exchange.restore, node.connection.put = remember, put_and_flip
        return super().__call__(node)

    @property
    def late(self):
        return "after a contribution" in self.steps_of_flips

    def gradient(self, rank, incarnation, step, size):
        if (rank, incarnation) == (1, 1) and step in self.steps_of_flips:
            self.flip(self.jobs[1])
        return SimulatedTraining.gradient(rank, incarnation, step, size)


def flip_copy(jobs):
    jobs[0].copy[0][7] += 0.5


def flip_outer(jobs):
    """Change what is kept of the outer optimizer, in the last chunk of all shards."""
    (job,) = jobs
    for shard in range(job.layout.shards):
        for chunk in list(job.layout.chunks(shard, 2**20))[-1:]:
            job.outer_state(chunk)["momentum_buffer"][0] += 0.5


def errors_in(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]


def test_gather_values_that_changed_are_noticed_and_loaded_again(caplog):
    training = Remembering(6, (40,), flip=flip_copy, steps=[4])
    outcome = once(training, Schedule(3), gathering())
    assert outcome.errors() == {}
    assert "rank 1: the state of fragment 0 after sync 3 is not the one that" in caplog.text
    assert [reloads(training, rank) for rank in range(3)] == [0, 1, 0]


@pytest.mark.parametrize(
    ("flip", "step", "message"),
    [
        (flip_outer, 6, "the outer optimizer's tensors in simulated://run/state/00000003/000.00001"),
        (flip_copy, "after a contribution", "the values in simulated://run/state/00000003/000.00001"),
    ],
)  # fmt: skip
def test_gather_what_one_replica_alone_holds_is_not_gone_on_from(flip, step, message, caplog):
    training = Remembering(8, (40,), flip=flip, steps=[step])
    outcome = once(training, Schedule(3), gathering())
    assert outcome.errors() == {}
    assert {what.split(",")[0] for what in violations(outcome, training)} <= {"after sync 4"}
    assert message in caplog.text
    assert "state/00000003/000.done.json" not in {key for _, key, _ in outcome.store.history}


@pytest.mark.parametrize("first", [0, 1])
def test_gather_outer_state_is_compared_when_a_run_ends(first, caplog):
    """The first that leaves publishes the state that the run ends with; the others compare it."""
    training = Remembering(3, (40,), flip=flip_outer, steps=[])

    def train(node):
        leave = node.exchange.leave

        def late():
            if not node.exchange.ended:
                node.sleep(0.0 if node.rank == first else 5.0 + node.rank)
                if node.rank == 1:
                    flip_outer(training.jobs[1])
            leave()

        node.exchange.leave = late
        training(node)

    outcome = once(train, Schedule(3), gathering(3, publish_every=8))
    assert outcome.errors() == {}
    message = "state/00000003/000.done.json describes is not what this replica has computed"
    assert all(message in error for error in errors_in(caplog))
    speakers = [message[:7] for message in errors_in(caplog)]
    assert speakers == (["rank 1:"] if first == 0 else ["rank 0:", "rank 2:"])

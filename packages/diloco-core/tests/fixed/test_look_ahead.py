"""Before anything uses the shards that an incarnation has read, it looks whether the run is past
that sync already.
"""

from dataclasses import replace

from simulated import Fixed, Schedule, SimulatedTraining, simulate

from diloco_core import FencedError, ReplicaLostError
from diloco_core._run._claims import claim_key
from diloco_core._run._records._keys import commit_key
from diloco_core._run._records._records import GivenUp, Rollback
from diloco_core._run._sync._adopt import Adoption

SYNC = 3


def run_in_which(monkeypatch, before=None, after=None):
    """What becomes of a run of two ranks in which something happens before or after a first
    incarnation reads the shards of a sync.
    """
    run = Adoption.run

    def between(self):
        happens = self._incarnation.epoch == 1 and self._commit.sync == SYNC
        if happens and before is not None:
            before(self._incarnation)
        run(self)
        if happens and after is not None:
            after(self._incarnation, self._commit)

    monkeypatch.setattr(Adoption, "run", between)
    training = SimulatedTraining(6, (40, 30), 2)
    outcome = simulate(training, Schedule(2), Fixed(90.0, False, 100.0), most_incarnations=2)
    return outcome, training


def test_an_end_is_obeyed(monkeypatch):
    def ends(incarnation, commit):
        if incarnation.rank:
            return
        end = GivenUp(1, 0, "rank 1 has shown no sign of life")
        states = tuple(progress.sync for progress in incarnation.fragments)
        record = Rollback(
            SYNC + 1, states, (), {0: 1, 1: 1}, incarnation.rollback, run=incarnation.run, end=end
        )
        incarnation.store.create(commit_key(SYNC + 1), record.to_json)

    outcome, training = run_in_which(monkeypatch, after=ends)
    assert isinstance(outcome.results[0, 1], ReplicaLostError)
    assert "rank 1 has shown no sign of life" in str(outcome.results[0, 1])
    assert [report.sync for report in training.reports[0, 1]] == [*range(1, SYNC)]


def test_an_incarnation_that_was_replaced_stops(monkeypatch):
    """The next sync is decided with the newer incarnation, which also deletes what this one may
    still read.
    """

    def replaced(incarnation, commit):
        if incarnation.rank:
            return
        members = tuple(replace(each, sync=SYNC + 1, epoch=2) for each in commit.members)
        following = replace(commit, sync=SYNC + 1, members=members)
        incarnation.store.create(claim_key(0, 2), lambda: [b"{}"])
        incarnation.store.create(commit_key(SYNC + 1), following.to_json)

    outcome, training = run_in_which(monkeypatch, after=replaced)
    assert isinstance(outcome.results[0, 1], FencedError)
    assert [report.sync for report in training.reports[0, 1]] == [*range(1, SYNC)]

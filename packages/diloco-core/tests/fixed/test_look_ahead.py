"""Before anything uses the shards that an incarnation has read, it looks whether the run is past
that sync already.
"""

from dataclasses import replace

import pytest
from simulated import Fixed, Schedule, SimulatedStore, SimulatedTraining, simulate

from diloco_core import FencedError, ReplicaLostError
from diloco_core._run._records._keys import claim_key, commit_key
from diloco_core._run._records._records import Commit, GivenUp, Rollback

SYNC = 3


def ends(store, commit):
    """Rank 1 is given up."""
    record = Rollback(
        SYNC + 1, (SYNC, SYNC - 1), (), {0: 1, 1: 1}, run=commit.run,
        end=GivenUp(1, 0, "rank 1 has shown no sign of life"),
    )  # fmt: skip
    store.write(commit_key(SYNC + 1), record.to_json())


def replaces(store, commit):
    """The next sync is decided with a newer incarnation of rank 0, which also deletes what this one
    may still read.
    """
    members = tuple(replace(each, sync=SYNC + 1, epoch=2) for each in commit.members)
    store.write(claim_key(0, 2), b"{}")
    store.write(commit_key(SYNC + 1), replace(commit, sync=SYNC + 1, members=members).to_json())


@pytest.mark.parametrize(("meddle", "error"), [(ends, ReplicaLostError), (replaces, FencedError)])
def test_what_was_decided_meanwhile_is_obeyed(meddle, error):
    training, store, meddled = SimulatedTraining(6, (40, 30), 2), SimulatedStore(), []

    def opened(key):
        if key.startswith(f"state/{SYNC:08}/"):
            if not meddled:
                meddle(store, Commit.from_json(store.objects[commit_key(SYNC)], SYNC, ""))
            meddled.append(key)

    def prepare(node):
        if (node.rank, node.incarnation) == (0, 1):
            node.before("open", opened)

    settings, options = Fixed(90.0, return_within=100.0), {"most_incarnations": 2}
    outcome = simulate(training, Schedule(2), settings, store=store, prepare=prepare, **options)
    assert meddled
    assert isinstance(outcome.results[0, 1], error), outcome.results
    assert [report.sync for report in training.reports[0, 1]] == [*range(1, SYNC)]

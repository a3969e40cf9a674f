"""Wrong versions of fixed membership are caught by simulated runs."""

import math

import pytest
from fixed_lab import random_run

from diloco_core._run._round._shares import Shares
from diloco_core._run._sync import _compute, _sync

KINDS = ("kill before", "kill after", "zombie", "lose answer", "tear", "delay")
MOST = 120


def others_take_over_shards(monkeypatch):
    """Each rank's own part of a contribution is known to nobody else."""
    turn = Shares.turn

    def soon(self, shard):
        found = turn(self, shard)
        return self.grace if math.isinf(found) else found

    monkeypatch.setattr(Shares, "turn", soon)


def own_bytes_in_place_of_the_published_ones(monkeypatch):
    """What this life has computed counts only if the store holds it."""
    monkeypatch.setattr(
        _compute.Computation, "_is_same", lambda self, shard: bool(_settled(self, shard))
    )


def _settled(computation, shard):
    result = computation._result
    stored = result.shard(shard)
    result.settle(shard, *stored.sums(_compute.shard_metadata(result.job, result.sync)))
    return True


def a_sync_is_decided_without_all(monkeypatch):
    """With a quorum of one."""
    on_look = _sync.on_look

    def early(at, folder, *, overdue, expired):
        if folder is not None and at.rank in folder.chosen:
            return _sync.Create(tuple(folder.chosen.values()))
        return on_look(at, folder, overdue=overdue, expired=expired)

    monkeypatch.setattr(_sync, "on_look", early)


@pytest.mark.parametrize(
    "mutant",
    [
        others_take_over_shards,
        own_bytes_in_place_of_the_published_ones,
        a_sync_is_decided_without_all,
    ],
)
def test_it_is_caught(mutant, monkeypatch):
    mutant(monkeypatch)
    assert any(random_run(seed, KINDS) for seed in range(MOST))

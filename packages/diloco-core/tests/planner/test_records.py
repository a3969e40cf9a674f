"""The records that plans count are those of the exchange: a change of their format shows here."""

import planned_lab
import pytest
import torch
import training_lab

from diloco_core import DiLoCo
from diloco_core._arithmetic._rate import Rate, values_of
from diloco_core._planner import _records
from diloco_core._planner._records import HEX, RATE, STEPS, SYNC, records
from diloco_core._run._records._keys import Delta, commit_key, done_key, shard_key
from diloco_core._run._records._records import Commit, Done
from diloco_core._store._open import open_store


def usual(replicas, shards=3, full=True):
    return records(replicas=replicas, shards=shards, tensors=1, full=full)


def commit_of(replicas):
    members = tuple(Delta(SYNC, replicas // 2, 1, *STEPS, HEX, HEX) for _ in range(replicas))
    # All are of one rank, so that all numbers have as many digits; positions are by rank, so they are of the last ones.
    positions = {100_000 - replicas + number: STEPS[1] for number in range(replicas)}
    rate = Rate(values_of(RATE))
    return Commit(SYNC, 0, HEX, HEX, members, positions, SYNC, rate=rate, run=HEX)


@pytest.mark.parametrize("replicas", [1, 2, 7, 64])
class TestBytes:
    """Membership makes no difference."""

    def test_record_of_a_sync(self, replicas):
        commit = commit_of(replicas)
        digits = sum(len(str(rank)) - len(str(replicas // 2)) for rank in commit.positions)
        assert len(commit.to_json()) - digits == usual(replicas).commit

    @pytest.mark.parametrize("full", [True, False])
    def test_record_of_a_state(self, replicas, full):
        commit = commit_of(replicas)
        digits = sum(len(str(rank)) - len(str(replicas // 2)) for rank in commit.positions)
        sums = tuple(range(replicas))
        done = Done(SYNC, 0, sums, sums, commit, full)
        assert len(done.to_json()) - digits == usual(replicas, replicas, full).done

    def test_keys(self, replicas):
        found = usual(replicas)
        delta = Delta(SYNC, replicas // 2, 1, *STEPS, HEX, HEX)
        assert _records.contribution_key_of(replicas // 2) == delta.key
        assert found.contribution_key == len(delta.key)
        assert found.published_key == len(shard_key(SYNC, 0, 1, HEX))
        assert found.record_key == len(commit_key(SYNC))
        assert done_key(SYNC, 0).startswith(f"state/{SYNC:08}/000.done")


@pytest.mark.parametrize("kind", ["fixed", "sharded"])
def test_what_lies_in_the_store(tmp_path, kind):
    """Of records that depend on settings, names and machines, the sizes are usual ones."""
    stores = [open_store(str(tmp_path)) for _ in range(3)]

    def replica(exchange):
        layers = torch.nn.Sequential(*(torch.nn.Linear(20, 20) for _ in range(4)))
        model = torch.nn.ModuleDict({"transformer_layers": layers})  # names as long as usual
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        with DiLoCo(model, inner, exchange, sync_every=1):
            training_lab.push(model, inner, exchange.rank, 0)

    training_lab.run(
        replica,
        [planned_lab.exchange_of(kind, store, rank, 3, 1) for rank, store in enumerate(stores)],
    )
    found = records(replicas=3, shards=3, tensors=8, full=True, fixed=kind == "fixed")
    size = {path.name: path.stat().st_size for path in tmp_path.rglob("*.json")}
    assert size["manifest.json"] == pytest.approx(found.manifest, rel=0.1)
    assert size["0001.json"] == pytest.approx(found.claim, rel=0.1)
    if kind == "fixed":
        (beat, *_) = (tmp_path / "beats").iterdir()
        assert beat.stat().st_size == pytest.approx(_records.BEAT, abs=4)

"""Refusals of elastic runs: another model, other settings, another run, useless settings."""

from dataclasses import replace

import pytest
import torch
from simulated import Schedule, SimulatedStore, SimulatedTraining, once, simulate

from diloco_core import (
    CorruptedObjectError,
    DiLoCo,
    Elastic,
    MismatchError,
)
from diloco_core._run._records._keys import commit_key, done_key
from diloco_core._run._records._records import Commit, Done, digest, state_digest


def _base(store):
    """Return the digest of the state from which contributions to sync 3 are made."""
    done = Done.from_json(store.objects[done_key(2, 0)], 2, 0, "")
    return state_digest(done.sums)


class TestRefusals:
    def _errors(self, store, settings, world_size=2, **options):
        training = SimulatedTraining(
            syncs=5, sizes=options.pop("sizes", (40,)), sync_every=options.pop("sync_every", 2)
        )
        outcome = once(training, Schedule(world_size), settings, store=store, **options)
        return list(outcome.errors().values())

    @pytest.fixture
    def store(self):
        store = SimulatedStore()
        assert simulate(
            SimulatedTraining(syncs=2, sizes=(40,)), Schedule(2), Elastic(1, grace=5.0), store=store
        ).finished
        return store

    @pytest.mark.sampled
    @pytest.mark.parametrize(
        ("settings", "options", "message"),
        [
            (Elastic(2, grace=5.0), {}, "that it was begun with: pass min_replicas=1"),
            (Elastic(1, grace=5.0), {"world_size": 3}, "pass world_size=2, or begin a new run"),
            (Elastic(1, grace=5.0, topology="sharded"), {}, "pass topology='gather', or begin"),
            (Elastic(1, grace=5.0, publish_every=3), {}, "pass publish_every=4, or begin"),
            (Elastic(1, grace=5.0, retention=3), {}, "pass retention=2, or begin"),
            (Elastic(1, grace=5.0, resume=True), {"sync_every": 3}, "pass sync_every=2, or begin"),
            (Elastic(1, grace=5.0), {"sizes": (41,)}, "Tensor '0' is float32[40] outer in fragm"),
            (Elastic(1, grace=5.0), {"sizes": (40, 40)}, "pass fragments=1, or begin"),
        ],
    )  # fmt: skip
    def test_another_model_or_other_settings(self, store, settings, options, message):
        before = dict(store.objects)
        errors = self._errors(store, settings, **options)
        assert {type(error) for error in errors} == {MismatchError}
        assert message in str(errors[0])
        assert before.items() <= store.objects.items()

    def test_what_is_each_replicas_own_may_be_another(self, store):
        settings = Elastic(1, grace=7.0, late="drop")
        assert self._errors(store, settings, chunk_bytes=64, sync_timeout=50.0) == []

    @pytest.mark.sampled
    @pytest.mark.parametrize(
        "change",
        [
            {"previous": "0" * 16},
            {"rollback": 1},
            {"positions": {0: 6, 1: 6, 2: 5}},
            {"outer_steps": 2},
        ],
    )
    def test_a_record_that_does_not_follow_the_one_before(self, store, change):
        last = Commit.from_json(store.objects[commit_key(2)], 2, "")
        members = tuple(
            replace(each, sync=3, start=4, stop=6, base=_base(store)) for each in last.members
        )
        right = replace(
            last, sync=3, members=members, positions={0: 6, 1: 6}, outer_steps=3,
            base=_base(store), previous=digest(store.objects[commit_key(2)]),
        )  # fmt: skip
        store.write(commit_key(3), replace(right, **change).to_json())
        errors = self._errors(store, Elastic(1, grace=5.0))
        assert {type(error) for error in errors} == {CorruptedObjectError}
        assert all("does not follow" in str(error) for error in errors)

    def test_saved_states_are_for_fixed_runs(self):
        def train(node):
            model = torch.nn.Linear(4, 4)
            inner = torch.optim.SGD(model.parameters(), lr=0.1)
            outer = DiLoCo(model, inner, node.exchange, sync_every=1)
            outer.load_state_dict({})

        outcome = once(train, Schedule(1), Elastic(1, grace=5.0))
        assert "resumed from its store" in str(outcome.results[0, 1])

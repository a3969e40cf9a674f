"""Details of elastic runs that no other test would miss: updates that are interrupted, late owners,
who stands for whom.
"""

import pytest
import torch
from safetensors.torch import load
from simulated import (
    OtherTraining,
    Schedule,
    SimulatedStore,
    SimulatedTraining,
    flawless,
    once,
    simulate,
)

from diloco_core import Elastic, StoreUnavailableError
from diloco_core._run._records._keys import MANIFEST, Delta, commit_key, deltas, done_key, shard_key
from diloco_core._run._records._manifest import Manifest
from diloco_core._run._records._records import Commit


class Watched(SimulatedStore):
    """Remembers the keys of all writes; ``act`` is called with each of them."""

    def __init__(self, act=lambda key: None):
        super().__init__()
        self.written, self.act = [], act

    def write(self, key, data):
        super().write(key, data)
        self.written.append(key)
        self.act(key)


class Failing(SimulatedTraining):
    """Training that fails in its fourth step."""

    @staticmethod
    def gradient(rank, incarnation, step, size):
        if step == 3:
            raise ZeroDivisionError
        return SimulatedTraining.gradient(rank, incarnation, step, size)


def _commit(store, sync):
    return Commit.from_json(store.objects[commit_key(sync)], sync, "")


def _epochs(store, sync):
    return {member.rank: member.epoch for member in _commit(store, sync).members}


@pytest.mark.parametrize("how", ["lost", "damaged"])
def test_an_interrupted_update_starts_again(how, monkeypatch):
    interrupted = []
    monkeypatch.setattr("diloco_core._wire._delta.SUMMED_BYTES", 64)

    def trouble(node):
        real, seen = node.connection.read, {}

        def read(key, offset, size, **options):
            data = real(key, offset, size, **options)
            seen[key] = seen.get(key, 0) + 1
            if key.startswith("deltas/") and seen[key] == 3:
                interrupted.append(int(key.split("/")[1]))
                if how == "lost":
                    raise StoreUnavailableError("injected: the connection was lost")
                return bytes(size)
            return data

        node.connection.read = read

    training = SimulatedTraining(syncs=4, sizes=(400,))
    elastic = Elastic(2, grace=30.0, topology="sharded")
    outcome = flawless(training, Schedule(3), elastic, chunk_bytes=64, prepare=trouble)
    assert set(interrupted) == {1, 2, 3, 4}
    assert len(outcome.results) == 3  # nobody had to start again


def test_only_one_replica_does_the_work_of_an_owner_that_is_late():
    key, publishers = shard_key(2, 0, 3, ""), []

    def trouble(node):
        if node.rank == 3 and node.incarnation == 1:
            node.fault("create", key, "kill before")
        who = node.rank, node.incarnation
        node.before("create", lambda other: publishers.extend([who] * (other == key)))

    training = SimulatedTraining(syncs=4, sizes=(400,))
    schedule = Schedule(4, restart_after=60.0, latency=0.005)
    elastic = Elastic(2, grace=10.0, topology="sharded")
    outcome = flawless(training, schedule, elastic, prepare=trouble)
    assert list(_epochs(outcome.store, 2)) == [0, 1, 2, 3]
    assert publishers == [(3, 1), (0, 1)]  # the owner tried, and the one after it did it


@pytest.mark.parametrize("topology", ["sharded", "gather"])
class TestIncarnationsOfARank:
    def test_what_it_learned_is_dropped_if_the_one_before_is_counted(self, topology):
        def trouble(node):
            if (node.rank, node.incarnation) == (1, 1):
                node.fault("put", deltas(2), "zombie", 2.5)

        training = SimulatedTraining(syncs=6, sizes=(40,))
        elastic = Elastic(2, grace=30.0, topology=topology)
        outcome = flawless(training, Schedule(3, restart_after=0.5), elastic, prepare=trouble)
        first = training.reports[1, 2][0]
        assert (first.sync, first.inner_steps, first.contribution) == (2, 2, "dropped")
        assert _epochs(outcome.store, 2) == {0: 1, 1: 1, 2: 1}
        assert _epochs(outcome.store, 3) == {0: 1, 1: 2, 2: 1}

    def test_what_the_one_before_contributed_is_not_learned_again(self, topology):
        def trouble(node):
            if (node.rank, node.incarnation) == (1, 1):
                node.fault("put", deltas(2), "kill after")

        training, store = SimulatedTraining(syncs=6, sizes=(40,), pauses={(0, 3): 9.0}), Watched()
        elastic = Elastic(2, grace=30.0, topology=topology)
        schedule = Schedule(3, restart_after=0.5)
        flawless(training, schedule, elastic, store=store, prepare=trouble)
        assert (1, 2) in {(rank, incarnation) for rank, incarnation, _ in training.entered[2]}
        first = training.reports[1, 2][0]
        assert (first.sync, first.inner_steps, first.contribution) == (3, 2, "counted")
        assert _epochs(store, 2) == {0: 1, 1: 1, 2: 1}
        made = [delta for delta in map(Delta.parse, store.written) if delta is not None]
        assert [delta.epoch for delta in made if (delta.sync, delta.rank) == (2, 1)] == [1]


class TestPublishedState:
    def test_every_file_is_a_valid_safetensors_file(self, publishing):
        training = SimulatedTraining(syncs=4, sizes=(400,))
        store = simulate(training, Schedule(3), publishing(2)).store
        files = {
            key: load(data) for key, data in store.objects.items() if key.endswith(".safetensors")
        }
        assert {"deltas", "state", "inner"} <= {key.split("/")[0] for key in files}
        shards = [files[key] for key in sorted(files) if key.startswith("state/00000004/")]
        values = torch.cat([tensors["values.0"] for tensors in shards])
        assert torch.equal(values, training.states[4][0][2][0])
        assert all("outer.momentum_buffer.0" in tensors for tensors in shards)

    def test_an_initial_state_that_lost_the_race_is_removed(self):
        training, store = SimulatedTraining(syncs=2, sizes=(40,)), Watched()
        elastic = Elastic(2, grace=5.0, retention=50)  # so that nobody collects it
        # Rank 0 comes when another one has just lost its patience, and begins at once.
        flawless(training, Schedule(3, starts=[5.27]), elastic, store=store)
        written = {key.split("/")[1] for key in store.written if key.startswith("initial/")}
        assert len(written) == 2
        initial = Manifest.from_json(store.objects[MANIFEST], "").initial
        assert {key.split("/")[1] for key in store.below("initial/")} == {initial}

    def _begun(self, elastic, store):
        """Have a run begun in a store; returns a whole and valid shard of sync 3, of another course
        of the same run.
        """
        begun = simulate(SimulatedTraining(syncs=0, sizes=(400,)), Schedule(3), elastic)
        course = SimulatedStore()
        for key, data in begun.store.objects.items():
            if key.startswith((MANIFEST, "initial/")):
                store.write(key, data)
                course.write(key, data)
        assert simulate(
            OtherTraining(syncs=3, sizes=(400,)), Schedule(3), elastic, store=course
        ).finished
        key = shard_key(3, 0, 0, "")
        return key, course.objects[key]

    @pytest.mark.parametrize("topology", ["sharded", "gather"])
    def test_a_shard_that_its_record_does_not_mean_is_made_again(self, topology, caplog):
        elastic, store = Elastic(2, grace=30.0, topology=topology), SimulatedStore()
        foreign = self._begun(elastic, store)
        first = SimulatedTraining(syncs=3, sizes=(400,))
        outcome = flawless(first, Schedule(3), elastic, store=store)
        assert outcome.store.objects[foreign[0]] != foreign[1]
        outcome.store.write(*foreign)
        again = SimulatedTraining(syncs=5, sizes=(400,), salts=first.salts)
        flawless(again, Schedule(3), elastic, store=outcome.store, limit=200.0, most_incarnations=1)
        assert "its checksums are not those in the record of its state" in caplog.text
        assert f"writing {foreign[0]} again with the same content" in caplog.text

    def test_gather_a_state_with_a_foreign_shard_is_not_complete(self):
        elastic = Elastic(2, grace=30.0, topology="gather", publish_every=8)
        store = Watched(lambda key: store.write(*foreign) if key == commit_key(3) else None)
        foreign = self._begun(elastic, store)
        first = SimulatedTraining(syncs=3, sizes=(400,))
        flawless(first, Schedule(3), elastic, store=store)
        assert shard_key(3, 0, 1, "") in store.objects
        assert done_key(3, 0) not in store.objects
        again = SimulatedTraining(syncs=5, sizes=(400,), salts=first.salts)
        flawless(again, Schedule(3), elastic, store=store)


@pytest.mark.parametrize("is_away", [False, True], ids=["", "untold"])
@pytest.mark.parametrize("kind", [SimulatedTraining, Failing], ids=["left", "failed"])
def test_an_incarnation_that_ends_lets_go_of_its_store(kind, is_away):
    """Also if it cannot tell the others."""
    closed = []

    def gone(key):
        if is_away and key.endswith("leave"):
            raise StoreUnavailableError("gone")

    def trouble(node):
        node.connection.close = lambda: closed.append(node.rank)
        node.before("put", gone)

    settings = Elastic(1, grace=5.0)
    outcome = once(kind(3, (40,)), Schedule(2), settings, prepare=trouble)
    assert sorted(closed) == [0, 1]
    if not is_away:
        wanted = ZeroDivisionError if kind is Failing else int
        assert {type(result) for result in outcome.results.values()} == {wanted}


@pytest.mark.parametrize("seconds", [0.6, 1.2, 1.8])
@pytest.mark.parametrize(("sync", "step"), [(3, 2), (4, 3), (5, 4), (6, 5)])
def test_a_late_contribution_overtakes_the_next_incarnation(seconds, sync, step):
    def trouble(node):
        if (node.rank, node.incarnation) == (1, 1):
            node.fault("put", f"{deltas(sync)}00001.", "zombie", seconds)

    training = SimulatedTraining(syncs=9, sizes=(40, 30), sync_every=4, pauses={(1, step): 13.0})
    schedule = Schedule(3, restart_after=0.1)
    flawless(training, schedule, Elastic(2, grace=10.0), prepare=trouble)


def test_a_late_initial_state_does_not_stay_for_good():
    store, left = SimulatedStore(), shard_key(0, 0, 0, "f" * 16)

    def noticed(key):
        if key.startswith(deltas(30)):
            store.write(left, b"whatever")

    training = SimulatedTraining(syncs=66, sizes=(12,), sync_every=1)
    settings = Elastic(1, grace=30.0, topology="sharded", retention=1)
    outcome = simulate(
        training,
        Schedule(1),
        settings,
        store=store,
        prepare=lambda node: node.before("put", noticed),
    )
    assert outcome.errors() == {}
    assert left not in store.objects
    assert not store.below("initial")

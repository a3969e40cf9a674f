"""Situations that are easy to get wrong, one by one, and that no other test would miss."""

import pytest
import torch
from damage_lab import Watched, store_of
from simulated import (
    Fault,
    OtherTraining,
    Schedule,
    SimulatedStore,
    SimulatedTraining,
    flawless,
    once,
    simulate,
)

from diloco_core import CoreError, CorruptedObjectError, DiLoCo, Elastic, StoreUnavailableError
from diloco_core._run._records._keys import MANIFEST, Delta, commit_key, deltas, done_key, shard_key
from diloco_core._run._records._manifest import Manifest
from diloco_core._run._records._records import Commit


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

        training = SimulatedTraining(syncs=6, sizes=(40,), pauses={(0, 3): 9.0})
        elastic = Elastic(2, grace=30.0, topology=topology)
        schedule = Schedule(3, restart_after=0.5)
        store = flawless(training, schedule, elastic, prepare=trouble).store
        assert (1, 2) in {(rank, incarnation) for rank, incarnation, _ in training.entered[2]}
        first = training.reports[1, 2][0]
        assert (first.sync, first.inner_steps, first.contribution) == (3, 2, "counted")
        assert _epochs(store, 2) == {0: 1, 1: 1, 2: 1}
        made = filter(None, map(Delta.parse, store.contents))
        assert [delta.epoch for delta in made if (delta.sync, delta.rank) == (2, 1)] == [1]


class TestPublishedState:
    def test_an_initial_state_that_lost_the_race_is_removed(self):
        training = SimulatedTraining(syncs=2, sizes=(40,))
        elastic = Elastic(2, grace=5.0, retention=50)  # so that nobody collects it
        # Rank 0 comes when another one has just lost its patience, and begins at once.
        store = flawless(training, Schedule(3, starts=[5.27]), elastic).store
        written = {key.split("/")[1] for key in store.contents if key.startswith("initial/")}
        assert len(written) == 2
        initial = Manifest.from_json(store.objects[MANIFEST], "").initial
        assert {key.split("/")[1] for key in store.below("initial/")} == {initial}

    def _begun(self, elastic, store):
        """Begin a run; returns a valid shard of sync 3 of another course of the same run."""
        begun = simulate(SimulatedTraining(syncs=0, sizes=(400,)), Schedule(3), elastic)
        first = ((k, v) for k, v in begun.store.objects.items() if k.startswith((MANIFEST, "ini")))
        for key, data in first:
            store.write(key, data)
        course, training = store_of(store.objects), OtherTraining(syncs=3, sizes=(400,))
        assert simulate(training, Schedule(3), elastic, store=course).finished
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
        store = Watched(lambda key, _: store.write(*foreign) if key == commit_key(3) else None)
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


@pytest.mark.sampled
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
    options = {"store": store, "prepare": lambda node: node.before("put", noticed)}
    assert simulate(training, Schedule(1), settings, **options).errors() == {}
    assert left not in store.objects
    assert not store.below("initial")


def test_newest_states_that_lie_far_apart():
    # Gather publishes the state after sync 3 while that after sync 4 is not complete yet, so sync 1
    # is read again, which counted fewer ranks: rank 2 was late for it.
    for step in range(148, 170, 3):
        training = SimulatedTraining(syncs=9, sizes=(40, 40), pauses={(2, 0): 1.5})
        schedule = Schedule(3, faults=[Fault(1, 1, step, "kill before")], restart_after=0.1)
        settings = Elastic(2, grace=1.0, topology="gather", publish_every=2)
        flawless(training, schedule, settings)


@pytest.mark.parametrize("step", [8, pytest.param(1, marks=pytest.mark.slow)])
def test_gather_leaving_while_others_collect_what_was_just_published(step):
    for operation in range(60, 125, step):
        short = SimulatedTraining(syncs=3, sizes=(40,))
        long = SimulatedTraining(syncs=12, sizes=(40,))
        schedule = Schedule(3, faults=[Fault(2, 1, operation, "delay", 40.0)], latency=0.01)
        settings = Elastic(2, grace=5.0, topology="gather", publish_every=1, retention=1)

        def train(node, short=short, long=long):
            return (short if node.rank == 2 else long)(node)

        outcome = once(train, schedule, settings)
        assert outcome.errors() == {}


def test_what_a_flush_left_behind_is_open():
    fates = []

    def train(node):
        net = torch.nn.ParameterList([torch.zeros(64)])
        inner = torch.optim.SGD(net.parameters(), lr=1.0)

        def seen(report):
            if node.rank == 0:
                fates.append(report.contribution)

        with DiLoCo(net, inner, node.exchange, sync_every=2, on_sync=seen) as outer:
            while outer.committed < 4:
                node.sleep(20.0 if node.rank == 1 and outer.inner_steps < 2 else 1.0)
                net[0].grad = torch.ones(64)
                inner.step()
                if node.rank == 0 and outer.inner_steps == 1:
                    outer.flush()

        return net[0].detach().clone()

    outcome = once(train, Schedule(2), Elastic(2, grace=5.0, topology="sharded"))
    first = _commit(outcome.store, 1)
    assert (first.members[0].start, first.members[0].stop) == (0, 1)
    assert fates[0] == "open"
    # Each half was updated by another replica: both have counted the very same contribution.
    assert all(bool((values == values[0]).all()) for values in outcome.results.values())


def test_a_store_that_is_down_for_good_is_noticed_within_the_timeout():
    down = []

    def train(node):
        request = node.connection._request

        def failing(*given):
            if node.connection.clock() > 7.0:
                down.append(node.connection.clock())
                node.sleep(0.1)
                raise StoreUnavailableError("refused")
            return request(*given)

        node.connection._request = failing
        return SimulatedTraining(syncs=9)(node)

    outcome = once(train, Schedule(1), Elastic(1, grace=10.0), sync_timeout=100.0)
    assert isinstance(outcome.results[0, 1], CoreError)
    assert down[-1] - down[0] < 200


def test_with_two_damaged_contributions_it_says_what_to_do(publishing):
    """A single one would be mended by its author."""

    class Damaging(SimulatedStore):
        def write(self, key, data):
            if key.startswith(("deltas/00000003/00000.", "deltas/00000003/00001.")):
                data = data[:-40] + bytes([data[-40] ^ 1]) + data[-39:]
            super().write(key, data)

    training = SimulatedTraining(syncs=6, sizes=(40,))
    outcome = once(training, 3, publishing(2, grace=5.0), store=Damaging())
    errors = [each for each in outcome.errors().values() if isinstance(each, CorruptedObjectError)]
    assert errors, outcome.errors()
    assert all("started with resume='newest-whole'" in str(error) for error in errors)

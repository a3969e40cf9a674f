"""What is read is compared with what its record says of it, wherever a whole object may be the
wrong one.
"""

import pytest
import torch
from simulated import Schedule, SimulatedStore, SimulatedTraining, simulate, violations

from diloco_core import CorruptedObjectError, Elastic
from diloco_core._run._repair import check_shard, readable_done
from diloco_core._run._round._reload import ReloadError
from diloco_core._run._sync._compute import Computation
from diloco_core._run._sync._result import Result
from diloco_core._wire._published import shard_metadata

_KEY = "state/00000003/000.00000.safetensors"


def _with_incarnation(act):
    """Return what ``act(incarnation, store)`` returns or raises, after three syncs of a rank."""
    training, store, outcomes = SimulatedTraining(syncs=3, sizes=(40,)), SimulatedStore(), []

    def train(node):
        node.exchange.leave = lambda: None
        training(node)
        try:
            outcomes.append(act(node.exchange._incarnation, store))
        except CorruptedObjectError as error:
            outcomes.append(error)

    settings = Elastic(1, grace=5.0, topology="sharded")
    outcome = simulate(train, Schedule(1, latency=0.01), settings, store=store, most_incarnations=1)
    assert outcome.errors() == {}
    return outcomes[0]


def _written(incarnation):
    """The file of the state as memory holds it now: whole by its own checksums."""
    job = incarnation.fragments[0].job
    return b"".join(map(bytes, incarnation.shard(3, 0, 0).parts(shard_metadata(job, 3))))


def _change(incarnation, what):
    job = incarnation.fragments[0].job
    if what == "values":
        job.copy[0][3] += 1
    elif what == "outer state":
        job.outer_state(next(iter(job.layout.chunks(0, 2**20))))["momentum_buffer"][3] += 1


@pytest.mark.parametrize("before", ["there", "gone"])
@pytest.mark.parametrize("what", ["values", "outer state", "nothing"])
def test_the_state_before_is_the_one_that_was_adopted(what, before):
    """Otherwise it is computed again from the one before it, where that is there."""

    def act(incarnation, store):
        progress = incarnation.fragments[0]
        copy, whole = progress.job.copy[0].clone(), store.objects[_KEY]
        _change(incarnation, what)
        store.damage(_KEY, _written(incarnation))
        if what == "values":
            progress.values_at[0] = None  # an update was interrupted
        progress.outer_at[0] = None
        progress.job.begin()
        if before == "gone":
            store.damage("state/00000002/000.00000.safetensors", b"")
        try:
            made_again = Computation(Result.of(incarnation, progress.commit), local=False)._prepare(
                0
            )
        except ReloadError as reload:
            return reload
        assert made_again == (what != "nothing")
        assert progress.values_at[0] == progress.outer_at[0] == 3
        assert torch.equal(progress.job.copy[0], copy)
        assert store.objects[_KEY] == _written(incarnation) == whole
        return None

    reload = _with_incarnation(act)
    assert (reload is None) == (what == "nothing" or before == "there")
    assert reload is None or _KEY in str(reload.damage)


def test_a_state_that_is_gone_is_made_again_too(caplog):
    def act(incarnation, store):
        progress = incarnation.fragments[0]
        whole = store.objects[_KEY]
        progress.outer_at[0] = None
        store.remove(_KEY)
        progress.job.begin()
        made_again = Computation(Result.of(incarnation, progress.commit), local=False)._prepare(0)
        assert made_again is True
        assert store.objects[_KEY] == whole

    assert _with_incarnation(act) is None
    assert f"writing {_KEY} again with the same content, because it is gone" in caplog.text


def test_a_shard_is_not_made_again_from_other_contributions_or_another_state():
    """What comes out is compared with what was published before it is written."""

    def act(incarnation, store):
        progress = incarnation.fragments[0]
        progress.outer_at[0] = None
        store.damage(_KEY, b"damaged")
        store.damage("state/00000003/000.done.json", b"damaged")
        progress.rests[0] += 1
        progress.job.begin()
        with pytest.raises(ReloadError):
            Computation(Result.of(incarnation, progress.commit), local=False)._prepare(0)
        assert store.objects[_KEY] == b"damaged"
        assert progress.values_at[0] is progress.outer_at[0] is None

    assert _with_incarnation(act) is None


@pytest.mark.parametrize("part", ["values", "outer state", "header", "nothing"])
def test_a_shard_is_whole_only_if_all_of_it_is(part):
    def act(incarnation, store):
        data = bytearray(store.objects[_KEY])
        if part != "nothing":
            position = {
                "values": len(data) - 30,
                "outer state": len(data) - 30 - 4 * 40 - 8,
                "header": 30,
            }[part]
            data[position] ^= 1
        store.damage(_KEY, bytes(data))
        check_shard(incarnation, 3, 0, 0)

    assert (_with_incarnation(act) is None) == (part == "nothing")


def test_a_shard_that_is_whole_is_compared_with_its_record():
    def act(incarnation, store):
        _change(incarnation, "outer state")
        store.damage(_KEY, _written(incarnation))
        check_shard(incarnation, 3, 0, 0)
        check_shard(incarnation, 3, 0, 0, readable_done(incarnation, 3, 0))

    assert "its checksums are not those in the record of its state" in str(_with_incarnation(act))


def test_gather_who_computes_other_values_mends_nothing(monkeypatch):
    """One shard of the newest state is damaged, and another one comes out otherwise: this machine
    rounds differently.
    """
    first, store = SimulatedTraining(syncs=3, sizes=(40,)), SimulatedStore()
    settings = Elastic(2, grace=5.0, topology="gather", publish_every=1)
    simulate(first, Schedule(2, latency=0.01), settings, store=store)
    store.damage("state/00000003/000.00001.safetensors", b"")
    before = dict(store.objects)
    update = Computation._update

    def other(self, batch, inputs):
        update(self, batch, inputs)
        if 0 in batch and self._commit.sync == 3:
            self._job.copy[0][3] += 2**-10

    monkeypatch.setattr(Computation, "_update", other)
    again = SimulatedTraining(syncs=4, sizes=(40,), salts=dict(first.salts))
    outcome = simulate(
        again, Schedule(2, latency=0.01), settings, store=store, most_incarnations=1, limit=500.0
    )
    errors = list(outcome.errors().values())
    assert len(errors) == 2, outcome.errors()
    assert all("different kinds of processors round differently" in str(error) for error in errors)
    assert {
        key: data for key, data in store.objects.items() if key.startswith(("state/", "commits/"))
    } == {key: data for key, data in before.items() if key.startswith(("state/", "commits/"))}


def test_gather_published_values_that_one_replica_alone_holds_are_not_gone_on_from(caplog):
    """They change in its memory between its contribution and the publication of the state that it
    was taken from.
    """
    training = SimulatedTraining(syncs=8, sizes=(40,))

    def train(node):
        restore, put = node.exchange.restore, node.connection.put

        def remember(jobs, **options):
            node.exchange.copies = jobs[0].copy
            return restore(jobs, **options)

        def flip(key, parts):
            size = put(key, parts)
            if node.rank == 1 and key.startswith("deltas/00000004/00001."):
                node.exchange.copies[0] += 0.5
            return size

        node.exchange.restore, node.connection.put = remember, flip
        return training(node)

    settings = Elastic(2, grace=20.0, topology="gather", publish_every=1)
    outcome = simulate(train, Schedule(3), settings, most_incarnations=1)
    assert outcome.errors() == {}
    assert {what.split(",")[0] for what in violations(outcome, training)} <= {"after sync 4"}
    assert (
        "the values in simulated://run/state/00000003/000.00001.safetensors differ" in caplog.text
    )
    assert "state/00000003/000.done.json" not in {key for _, key, _ in outcome.store.history}

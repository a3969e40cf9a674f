"""Damaged or lost objects of a fixed run to be continued are named, mended or passed over."""

import copy
import logging

import keys_lab
import pytest
import torch
from damage_lab import flip, run_of
from keys_lab import MANIFEST, copy_key
from simulated import SimulatedStore
from strict_lab import Generations, Run, refused
from training_lab import identical

from diloco_core import CorruptedObjectError, RendezvousTimeoutError
from diloco_core._run._records._keys import commit_key
from diloco_core._run._records._records import Rollback

MEETING = keys_lab.meeting_key(1)


@pytest.fixture
def stopped(new_store):
    """A run of two ranks after three outer steps, whose replicas have left."""
    run = Run(2, store=new_store())
    run.live(until=3)
    return run


def newest(run, kind="state", **wanted):
    return keys_lab.keys_of(keys_lab.newest(run.store.objects), kind, **wanted)[-1]


def kept(run, *kinds):
    """The objects of some kinds."""
    objects = run.store.objects.items()
    return {key: data for key, data in objects if keys_lab.kept(key).kind in kinds}


def harm(run, key, place=0.5):
    for harmed in {key, copy_key(key)} & set(run.store.objects):
        data = run.store.objects[harmed]
        run.store.damage(harmed, flip(data, int(8 * len(data) * place)))


def corrupted(results):
    return next(str(result) for result in results if isinstance(result, CorruptedObjectError))


class TestState:
    @pytest.mark.sampled
    @pytest.mark.parametrize(("place", "rank"), [(0.02, 0), (0.5, 1), (0.9, 0), (0.9999, 1)])
    def test_it_is_named_and_the_one_before_is_taken_if_asked(self, stopped, caplog, place, rank):
        key = newest(stopped, rank=rank)
        harm(stopped, key, place)
        before, seen = kept(stopped, "state"), {}
        results = stopped.live(resume=True)
        assert max(stopped.ended.values()) < 150.0, "no longer than for a lost rank"
        named = corrupted(results)
        assert "after sync 3" in named or key in named
        assert "newest-whole" in named
        assert not [result for result in results if isinstance(result, dict)]
        assert before.items() <= kept(stopped, "state").items()
        with caplog.at_level(logging.WARNING):
            results = stopped.live(resume="newest-whole", seen=seen)
        assert identical(results)
        assert (2, 4, 0) in seen.values()
        assert key in caplog.text
        assert "has deleted it" not in caplog.text

    @pytest.mark.sampled
    @pytest.mark.parametrize("rank", [0, 1])
    def test_a_part_of_it_is_gone(self, stopped, rank):
        stopped.store.remove(lost := newest(stopped, rank=rank))
        assert f"{lost} is gone" in corrupted(stopped.live(resume=True))
        seen = {}
        assert identical([*stopped.live(resume="newest-whole", seen=seen), *Run(2).live()])
        assert seen == dict.fromkeys(range(2), (2, 4, 0))

    @pytest.mark.parametrize("same", [True, False])
    def test_a_part_of_the_initial_one_is_gone(self, same):
        """A replica that has built the same model has it in memory."""
        run = Run(2)
        run.live(until=-1)  # which it has reached when it begins
        run.store.remove(lost := newest(run))
        if not same:
            run.net = lambda: torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2))
        results = run.live(resume=True)
        if same:
            assert identical([*results, *Run(2).live()])
        else:
            assert f"{lost} is gone" in corrupted(results)


class TestInnerState:
    def test_of_a_sync_that_was_given_up(self, stopped, caplog):
        """The only save is that of the last sync, whose state is gone."""
        for key in kept(stopped, "inner"):
            if keys_lab.kept(key).sync != 3:
                stopped.store.remove(key)
        stopped.store.remove(newest(stopped))
        seen = {}
        assert identical(stopped.live(resume="newest-whole", seen=seen, until=3))
        assert seen == dict.fromkeys(range(2), (2, 4, 4))
        assert "inner state" in caplog.text
        caplog.clear()
        assert identical(stopped.live(resume=True))
        assert "given up" not in caplog.text, "it was deleted when the next one was saved"


def test_a_claim_that_was_never_whole(monkeypatch):
    """It counts by its key."""
    write, run, claim = SimulatedStore.write, Run(2), keys_lab.claim_key(1, 2)
    run.live(until=3)

    def damaged(store, key, data):
        write(store, key, flip(data, 4 * len(data)) if key == claim else data)

    monkeypatch.setattr(SimulatedStore, "write", damaged)
    assert identical([*run.live(resume=True), *Run(2).live()])


class TestWhatReplicasMeetBy:
    @pytest.fixture
    def run(self):
        run = Generations(2)
        run.live(until=3)
        return run

    def test_it_is_never_whole(self, run, monkeypatch):
        write = SimulatedStore.write

        def damaged(store, key, data):
            write(store, key, flip(data, 4 * len(data)) if key == MEETING else data)

        with monkeypatch.context() as patch:
            patch.setattr(SimulatedStore, "write", damaged)
            result, _ = run.live(resume=True)
        with pytest.raises(RendezvousTimeoutError, match="missing: rank 1"):
            raise result
        assert identical([*run.live(resume=True), *Run(2).live()]), "that does no harm later"

    def test_it_is_damaged_after_its_writer_has_met(self, run, monkeypatch):
        """Rank 0 cannot read that rank 1 names it."""
        write, harmed = SimulatedStore.write, []

        def damaged_once(store, written, data):
            met = written == MEETING and "" not in keys_lab.fields(MEETING, data)["nonces"]
            if met and not harmed:
                harmed.append(data)
                data = flip(data, 4 * len(data))
            write(store, written, data)

        monkeypatch.setattr(SimulatedStore, "write", damaged_once)
        assert identical(run.live(resume=True))
        assert harmed


class TestGenerationThatWasBegun:
    """Without its manifest it looks as if it was not, and what was learned there would be lost."""

    @pytest.fixture
    def run(self):
        run = Generations(2)
        run.live(until=3)
        run.live(resume=True, until=4)
        self.folder = run.begun()[0]
        for name in (MANIFEST, copy_key(MANIFEST)):
            run.store.remove(self.folder + name)
        return run

    def test_it_is_named(self, run):
        text = f"{self.folder}{MANIFEST} and its copy are gone.*newest-whole"
        refused(run, CorruptedObjectError, text)

    def test_it_is_given_up_where_that_is_agreed(self, run, caplog):
        seen = {}
        assert identical([*run.live(resume="newest-whole", seen=seen), *Run(2).live()])
        assert seen == dict.fromkeys(range(2), (3, 6, 0))
        assert f"{self.folder}{MANIFEST} and its copy are gone" in caplog.text
        caplog.clear()
        assert identical(run.live(resume=True, until=7)), "what was given up is known from then on"
        assert "are gone" not in caplog.text


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("number", "states", "text"),
    [
        (20_000, (0,), r"is a rollback, but \d+ of the records before it are gone"),
        (99_999_999, (0,), r"is a rollback, but \d+ of the records before it are gone"),
        (4, (0, 0), "names 2 states, but the run has 1 fragments"),
        (4, (0, 0, 0), "names 3 states, but the run has 1 fragments"),
    ],
)
def test_a_rollback_that_nobody_can_have_decided_is_refused(number, states, text):
    """Nobody makes up for thousands of records that never were."""
    run = Run(2)
    run.live(until=3)
    before = len(run.store.objects)
    stranger = Rollback(number, states, (), {}, run=run_of(run.store))
    run.store.write(commit_key(number), stranger.to_json())
    for error in run.live(until=5, resume=True):
        with pytest.raises(CorruptedObjectError, match=text):
            raise error
    assert len(run.store.objects) < before + 20


def published(run, copies=False, **wanted):
    return keys_lab.keys_of(keys_lab.newest(run.store.objects), "state", copy=copies, **wanted)


@pytest.fixture(params=[Run, Generations], ids=["deciding", "overwriting"])
def make(request):
    """Makes runs in both kinds of stores."""
    return request.param


def survives(run, fragments, at_least):
    """Damage one object after the other, and go on without it.

    Returns the outer steps from which the run went on.
    """
    steps = set()
    for key in published(run):
        again = type(run)(2, fragments, syncs=at_least + 2, store=copy.deepcopy(run.store))
        again.incarnations = run.incarnations
        again.store.objects[key] = flip(again.store.objects[key], 4 * len(run.store.objects[key]))
        seen = {}
        assert identical(again.live(resume="newest-whole", seen=seen)), key
        steps |= {committed for committed, _, _ in seen.values()}
    return steps


@pytest.mark.sampled
@pytest.mark.parametrize("fragments", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_of_a_run_that_ended_in_order(make, fragments):
    run, syncs = make(2, fragments), 3 * fragments
    run.live(until=syncs)
    # The newest of any fragment may be the one that is damaged: then the syncs since then are given
    # up, too.
    assert survives(run, fragments, syncs) <= set(range(syncs - fragments, syncs + 1))
    run.live(resume=True, until=syncs + 1)
    assert survives(run, fragments, syncs + 1) <= set(range(syncs + 1 - fragments, syncs + 2))


@pytest.mark.parametrize("fragments", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize(
    "operation",
    [150, *(pytest.param(at, marks=pytest.mark.slow) for at in range(140, 190) if at != 150)],
)
def test_of_a_run_that_was_killed_in_the_middle_of_a_sync(make, fragments, operation):
    run = make(2, fragments)
    run.live((0, operation, "kill before"), (1, operation - 2, "kill before"), until=40)
    assert len(published(run)) >= 2 * (fragments + 1)
    survives(run, fragments, 10)

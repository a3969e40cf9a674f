"""A fixed run that has stopped is continued by all of its ranks, as if it had not stopped."""

import logging
import random

import keys_lab
import pytest
from strict_lab import Overwriting, Run
from training_lab import identical

from diloco_core import RunExistsError

#: Some are started long after the others, which must not give them up meanwhile.
PATIENT = {rank: {"return_within": 300.0} for rank in range(3)}
LOST = "counts as nothing"


def same(held, wanted):
    return identical([*held, *wanted])


@pytest.mark.sampled
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize("adam", [False, True], ids=["SGD", "Adam"])
def test_a_run_that_was_stopped_ends_as_one_that_was_not(ranks, fragments, adam, new_store, caplog):
    caplog.set_level(logging.INFO)
    wanted = Run(ranks, fragments, adam).live()
    run = Run(ranks, fragments, adam, store=new_store())
    run.live(until=3)
    assert "is continued" not in caplog.text
    seen = {}
    held = run.live(resume=True, seen=seen)
    assert same(held, wanted)
    assert seen == dict.fromkeys(range(ranks), (3, 6, 0))
    for rank in range(ranks):
        assert f"rank {rank}: goes on from outer step 3, and from inner step 6" in caplog.text


def as_undisturbed(run, caplog):
    """Check that a run has lost nothing, and its fragments have had their turns in the same order.

    An end takes the number of a sync, and with it the turn of a fragment.
    """
    records = keys_lab.keys_of(run.store.objects, "commit")
    ended = any(b'"missed"' in run.store.objects[key] for key in records)
    return not run.behind and LOST not in caplog.text and not (ended and run.fragments > 1)


def until_the_end(run, chance, most_stops, latest=80):
    """Start all ranks again and again, and kill any of them anywhere, until the run ends."""
    stops, results = 0, run.live(*kills(run, chance, 25, latest), seed=0)
    while not all(isinstance(result, dict) for result in results):
        if not keys_lab.keys_of(run.store.objects, "manifest"):
            return None
        stops += 1
        harm = kills(run, chance, 4, 90) if stops < most_stops else []
        starts = [chance.choice([0.0, 1.0, 150.0]) for _ in range(run.ranks)]
        results = run.live(*harm, resume=True, starts=starts, seed=stops)
        if stops >= most_stops:
            break
    return results


def kills(run, chance, least, most):
    dying = [rank for rank in range(run.ranks) if chance.random() < 0.7]
    kinds = ("kill before", "kill after")
    return [(rank, chance.randrange(least, most), chance.choice(kinds)) for rank in dying]


def seeds(usual, most):
    return [
        pytest.param(seed, marks=[] if seed < usual else pytest.mark.slow) for seed in range(most)
    ]


# One value is a block, so all shards of a small model have some.
ENCODED = {"state_codec": "bf16", "full_state_every": 3}


@pytest.mark.sampled
@pytest.mark.parametrize("seed", seeds(4, 200))
@pytest.mark.parametrize("encoded", [False, True], ids=["plain", "encoded"])
def test_killed_anywhere_it_ends_as_a_run_that_was_not(seed, encoded, new_store, caplog):
    """Inner state is saved after every sync."""
    chance = random.Random(seed)
    kind = {"ranks": chance.choice([1, 2, 3]), "fragments": chance.choice([1, 2])}
    if encoded:
        kind |= {"syncs": 10, "options": {**ENCODED, "codec": chance.choice(["plain", "bf16"])}}
    else:
        kind |= {"adam": chance.random() < 0.5}
    run = Run(**kind, store=new_store(), limits=PATIENT)
    results = until_the_end(run, chance, 4, 160 if encoded else 80)
    if results is None:
        return
    assert all(isinstance(result, dict) for result in results), results
    assert identical(results)
    if as_undisturbed(run, caplog):
        assert same(results, Run(**kind).live())


def test_initial_values_are_not_written_again_with_later_ones():
    """They are gone; by the time that all updates are added, memory holds other values."""
    run = Run(2, options=ENCODED)
    run.live(until=2)
    (lost,) = keys_lab.keys_of(run.store.objects, "state", sync=0, rank=1)
    before = run.store.objects[lost]
    run.store.remove(lost)
    assert same(run.live(until=2, resume=True), Run(2, options=ENCODED).live(until=2))
    assert run.store.objects.get(lost, before) == before


@pytest.mark.sampled
@pytest.mark.parametrize("seed", seeds(1, 100))
@pytest.mark.parametrize("options", [{}, ENCODED], ids=["plain", "encoded"])
def test_who_wakes_up_late_changes_nothing(seed, options, new_store, caplog):
    """Replicas of the earlier incarnation hang anywhere, and wake up while the run goes on."""
    chance = random.Random(seed)
    ranks, fragments = chance.choice([1, 2, 3]), chance.choice([1, 2])
    run = Run(ranks, fragments, syncs=8, options=options, store=new_store())
    hung = [rank for rank in range(ranks) if chance.random() < 0.8] or [0]
    sleeps = [(rank, chance.randrange(40, 90), 290 + 25 * chance.random()) for rank in hung]
    earlier, later = run.overtaken(sleeps, at=200.0, seed=seed)
    if all(isinstance(result, dict) for result in earlier):
        return  # it came to its end before anybody hung
    assert all(isinstance(result, dict) for result in later), (seed, earlier, later)
    assert identical(later)
    if as_undisturbed(run, caplog):
        assert same(later, Run(ranks, fragments, syncs=8, options=run.options).live())
    run.syncs += 1
    assert identical(run.live(resume=True))


@pytest.mark.sampled
@pytest.mark.parametrize("until", [3, -1], ids=["later", "before the first sync"])
@pytest.mark.parametrize("late", [0, 1])
def test_ranks_may_be_started_one_after_another(late, until, new_store):
    """What processes have said of their end is no word of those that follow them."""
    run = Run(2, store=new_store())
    run.live(until=until)
    starts = [60.0 * (rank == late) for rank in range(2)]
    assert same(run.live(resume=True, starts=starts), Run(2).live())


@pytest.mark.parametrize("resume", [True, False])
def test_nor_is_an_error_before_the_first_sync(resume):
    run = Run(2, limits=PATIENT)

    def fails(process, kind, key):
        if kind == "put" and keys_lab.of("contribution", rank=process.rank)(key):
            raise ValueError("an error in training")

    run.before = fails
    run.live()
    run.before = None
    assert keys_lab.keys_of(run.store.objects, "note")
    assert same(run.live(resume=resume, starts=[0.0, 60.0]), Run(2).live())


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["get", "put", "list", "delete"])
@pytest.mark.parametrize("sync", [2, 4])
def test_a_sleeper_leaves_what_the_next_one_has_saved(kind, sync):
    """It hangs before one of the requests with which it saves."""
    run, saving, hung = Run(2, adam=True, syncs=6), [], []

    def before(process, request, key):
        if process.number or hung:
            return
        # A contribution comes next after it has saved what belongs to the sync before.
        found = keys_lab.kept(key)
        saving[:] = [process] if found.kind == "state" and found.sync == sync else saving
        place = found.kind == "claim" or key.startswith(f"inner/{process.rank:05}/")
        if saving and request == kind and place:
            hung.append(key)
            process.sleep(320.0)

    run.before = before
    _, later = run.overtaken([], at=200.0)
    run.before = None
    assert hung
    assert identical(later)
    for saved in (5, 6):
        assert keys_lab.kept(key := newest_saved(run, saved)).incarnation == 2, key
    assert identical(run.live(resume=True, until=8))
    assert {
        keys_lab.kept(key).incarnation for key in keys_lab.keys_of(run.store.objects, "inner")
    } == {3}


def newest_saved(run, sync):
    """The key of what rank 0 has saved after this outer step; an end takes the number of a sync."""
    saved = keys_lab.keys_of(run.store.objects, "inner", rank=0)
    return sorted(saved)[sync - 7]


def test_one_that_hangs_does_not_choose_the_state_once_more():
    """The other process of its rank sees that it is there."""
    run = Run(1, syncs=30, store=Overwriting())
    run.live((0, 50, "kill after"))
    hung = []

    def before(process, kind, key):
        if not process.number and kind == "put" and key.endswith("/carried.json"):
            hung.append(key)
            process.sleep(500.0)

    run.before = before
    first, second = run.simulate([(0, start, [], True) for start in (0.0, 10.0)], until=30)
    assert hung
    assert isinstance(first, dict), first
    assert isinstance(second, RunExistsError)

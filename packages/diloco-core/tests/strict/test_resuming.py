"""A strict run that has stopped is continued by all of its ranks, as if it had not stopped."""

import logging
import random

import keys_lab
import pytest
import torch
from strict_lab import Run
from training_lab import identical

from diloco_core import RendezvousTimeoutError, RunExistsError


def same(held, wanted):
    return identical([*held, *wanted])


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize("adam", [False, True], ids=["SGD", "Adam"])
def test_a_run_that_was_stopped_ends_as_one_that_was_not(ranks, fragments, adam, caplog):
    caplog.set_level(logging.INFO)
    wanted = Run(ranks, fragments, adam).live()
    run = Run(ranks, fragments, adam)
    run.live(until=3)
    assert "is continued" not in caplog.text
    seen = {}
    held = run.live(resume=True, seen=seen)
    assert same(held, wanted)
    assert seen == dict.fromkeys(range(ranks), (3, 6, 0))
    for rank in range(ranks):
        assert f"rank {rank}: the run is continued from outer step 3, inner step 6" in caplog.text


def test_chunks_may_have_another_size_than_before():
    """Published files do not depend on it. Only the rounding of the outer step does, since it is taken chunk by chunk."""
    run = Run(2)
    run.live(until=3)
    run.chunk = 24
    held, wanted = run.live(resume=True), Run(2).live()
    assert identical(held)
    assert all(torch.allclose(held[0][name], wanted[0][name], atol=1e-6) for name in held[0])


def until_the_end(run, chance, most_stops, latest=80):
    """Start all ranks again and again, and kill any of them anywhere, until the run comes to its end."""
    stops, results = 0, run.live(*kills(run, chance, 25, latest), seed=0)
    while not all(isinstance(result, dict) for result in results):
        begun = keys_lab.MANIFEST in run.store.objects and run.whole()
        if not begun:
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


SEEDS = [
    pytest.param(seed, marks=[] if seed < 10 else pytest.mark.slow, id=str(seed))
    for seed in range(200)
]


@pytest.mark.parametrize("seed", SEEDS)
def test_whoever_is_killed_and_wherever_the_run_can_be_resumed_and_ends_as_one_that_was_not(seed):
    """Inner state is saved after every sync, so it is that of the state that is resumed, or of the sync before it."""
    chance = random.Random(seed)
    ranks, fragments, adam = chance.choice([1, 2, 3]), chance.choice([1, 2]), chance.random() < 0.5
    run = Run(ranks, fragments, adam)
    results = until_the_end(run, chance, 4)
    if results is None:
        return
    assert all(isinstance(result, dict) for result in results), results
    assert identical(results)
    if not run.behind:
        assert same(results, Run(ranks, fragments, adam).live())


ENCODED = {
    "state_codec": "bf16",
    "full_state_every": 3,
}  # one value is a block, so all shards of a small model have some


@pytest.mark.parametrize(
    "seed",
    [pytest.param(seed, marks=[] if seed < 6 else pytest.mark.slow) for seed in range(100)],
)
def test_a_run_with_encoded_state_can_be_resumed_wherever_it_was_stopped(seed):
    chance = random.Random(seed)
    ranks, fragments = chance.choice([1, 2, 3]), chance.choice([1, 2])
    options = {**ENCODED, "codec": chance.choice(["plain", "bf16"])}
    run = Run(ranks, fragments, syncs=10, options=options)
    results = until_the_end(run, chance, 4, 160)
    if results is None:
        return
    assert all(isinstance(result, dict) for result in results), results
    assert identical(results)
    if not run.behind:
        assert same(results, Run(ranks, fragments, syncs=10, options=options).live())


@pytest.mark.parametrize("fragments", [1, 2])
def test_a_run_with_encoded_state_keeps_what_it_will_need(fragments):
    """However many syncs each life takes: what a life deletes is needed by none of the next ones."""
    wanted = Run(2, fragments, syncs=13, options=ENCODED).live()
    for first, second in [(4, 9), (5, 6), (6, 12), (7, 10)]:
        run = Run(2, fragments, syncs=13, options=ENCODED)
        run.live(until=first)
        run.live(until=second, resume=True)
        assert same(run.live(resume=True), wanted), (first, second)


def test_encoded_state_without_an_update_before_it_is_incomplete():
    run = Run(2, options=ENCODED)
    run.live(until=5)
    (lost,) = keys_lab.keys_of(run.store.objects, "state", sync=4, rank=1)
    run.store.remove(lost)
    results = run.live(resume=True)
    assert any(f"is incomplete: {lost} missing" in str(result) for result in results)


def test_initial_values_are_not_written_again_with_later_ones():
    """The first object is gone and its copy is used; by the time that all updates are added, there are other values."""
    run = Run(2, options=ENCODED)
    run.live(until=2)
    (lost,) = keys_lab.keys_of(run.store.objects, "state", sync=0, rank=1, copy=False)
    before = run.store.objects[lost]
    run.store.remove(lost)
    assert same(run.live(until=2, resume=True), Run(2, options=ENCODED).live(until=2))
    assert run.store.objects.get(lost, before) == before


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_who_wakes_up_late_changes_nothing_of_encoded_state(seed):
    late_ones_change_nothing(seed, ENCODED)


def test_who_wakes_up_late_changes_nothing():
    """All replicas of the earlier life, or some, hang anywhere, and wake up while the run goes on without them."""
    for seed in range(6):
        late_ones_change_nothing(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6, 100))
def test_who_wakes_up_late_changes_nothing_either(seed):
    late_ones_change_nothing(seed)


def late_ones_change_nothing(seed, options=None):
    chance = random.Random(seed)
    ranks, fragments = chance.choice([1, 2, 3]), chance.choice([1, 2])
    run = Run(ranks, fragments, syncs=8, options=options or {})
    hung = [rank for rank in range(ranks) if chance.random() < 0.8] or [0]
    sleeps = [(rank, chance.randrange(40, 90), 290 + 25 * chance.random()) for rank in hung]
    earlier, later = run.overtaken(sleeps, at=200.0, seed=seed)
    if all(isinstance(result, dict) for result in earlier):
        return  # it came to its end before anybody hung
    assert all(isinstance(result, dict) for result in later), (seed, earlier, later)
    assert identical(later)
    if not run.behind:
        assert same(later, Run(ranks, fragments, syncs=8, options=run.options).live())
    run.syncs += 1
    assert identical(run.live(resume=True))


def test_ranks_may_have_had_different_numbers_of_lives():
    """An attempt in which one rank was alone, one that was killed while it met, and then all of them."""
    run = Run(3)
    run.live(until=2)
    (alone,) = run.live(resume=True, ranks=[0])
    assert isinstance(alone, RendezvousTimeoutError)
    assert alone.missing == (1, 2)
    run.live((1, 25, "kill after"), (2, 30, "kill before"), (0, 30, "kill after"), resume=True)
    assert same(run.live(resume=True), Run(3).live())
    claims = [keys_lab.keys_of(run.store.objects, "claim", rank=rank) for rank in range(3)]
    assert list(map(len, claims)) == [4, 3, 3]


def test_what_earlier_lives_left_behind_goes():
    run = Run(2)
    run.live((0, 60, "kill before"), (1, 64, "kill after"))
    run.live(resume=True)
    run.syncs += 3
    run.live(resume=True)
    newest = keys_lab.name_in(run.store.objects[keys_lab.manifest_key(3)], 3)
    for kind, most in (("state", 6), ("contribution", 4), ("inner", 4)):
        assert len(keys_lab.keys_of(run.store.objects, kind)) <= most, kind
    states = keys_lab.keys_of(run.store.objects, "state")
    assert {keys_lab.kept(key).run for key in states} == {newest}


@pytest.mark.parametrize("kind", ["get", "put", "list", "delete"])
@pytest.mark.parametrize("sync", [2, 4])
def test_who_wakes_up_while_it_saves_inner_state_leaves_that_of_the_next_life(kind, sync):
    """It hangs before one of the requests with which it saves: it looks who holds its rank, writes, and tidies up."""
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
    newest = keys_lab.name_in(run.store.objects[keys_lab.manifest_key(2)], 2)
    for saved in (5, 6):
        assert keys_lab.inner_key(newest, saved, 0, 2) in run.store.objects
    assert identical(run.live(resume=True, until=8))
    assert {keys_lab.kept(key).life for key in keys_lab.keys_of(run.store.objects, "inner")} == {3}


def test_two_launches_at_the_same_time_where_a_store_ignores_conditions():
    """The second one is refused, although it could write over the claims and the manifest of the first one."""
    run = Run(2, syncs=8)
    run.store.exclusive = False
    run.live((0, 60, "kill after"), (1, 60, "kill after"))
    launches = [(rank, gap, [], True) for gap in (0.0, 0.4) for rank in range(2)]
    first, second, *others = run.simulate(launches, 0, until=8)
    assert identical([first, second])
    assert all("another process has begun to resume rank" in str(error) for error in others)


def test_two_processes_of_rank_0_choose_only_once():
    """Both look for other claims before either has made its own, and the store lets both claim the rank.

    Whose claim was overwritten is refused, and so is who wakes up when the other one has chosen.
    """
    reasons = set()
    for late, hang in [(0.0, 0.0), (0.1, 0.0), (0.4, 0.0), (1.0, 0.0), (0.1, 60.0), (60.0, 0.0)]:
        run = Run(1, syncs=30)
        run.store.exclusive = False
        run.live((0, 50, "kill after"))
        claimed = []

        def before(process, kind, key, late=late, hang=hang, claimed=claimed):
            if kind == "create" and keys_lab.kept(key).kind == "claim":
                process.sleep(1.0 + late * process.number)
                claimed.append(process)
            elif process.number and process in claimed and hang not in claimed:
                claimed.append(hang)
                process.sleep(hang)

        run.before = before
        results = run.simulate([(0, 0.0, [], True) for _ in range(2)], until=30)
        refused = [str(error) for error in results if isinstance(error, RunExistsError)]
        assert len(refused) + sum(isinstance(result, dict) for result in results) == 2, results
        assert len(claimed) == 3
        reasons.update(
            part for part in ("is taken by", "has already chosen") if part in str(refused)
        )
    assert reasons == {"is taken by", "has already chosen"}

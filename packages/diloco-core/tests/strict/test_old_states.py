"""No single damaged object of a published state ends a strict run, whichever fragment it belongs to, whenever the run stops."""

import copy

import pytest
from damage_lab import flip, late_bit
from keys_lab import copy_key, kept, keys_of
from strict_lab import Run, in_folder
from training_lab import identical

from diloco_core import RunExistsError, export


def published(run, copies=False, **wanted):
    return keys_of(run.store.objects, "state", copy=copies, **wanted)


def syncs_of(keys):
    return {kept(key).sync for key in keys}


def survives(run, fragments, at_least):
    """Damage one object after the other, and go on without it. Returns the outer steps from which the run went on."""
    steps = set()
    for key in published(run):
        again = Run(2, fragments, syncs=at_least + 2, store=copy.deepcopy(run.store))
        again.lives = run.lives
        again.store.objects[key] = flip(again.store.objects[key], 4 * len(run.store.objects[key]))
        seen = {}
        assert identical(again.live(resume="newest-whole", seen=seen)), key
        steps |= {committed for committed, _, _ in seen.values()}
    return steps


@pytest.mark.parametrize("fragments", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_of_a_run_that_ended_in_order(fragments):
    run, syncs = Run(2, fragments), 3 * fragments
    run.live(until=syncs)
    # The newest of any fragment may be the one that is damaged: then the syncs since then are given up, too.
    assert survives(run, fragments, syncs) == set(range(syncs - fragments, syncs + 1))
    run.live(resume=True, until=syncs + 1)
    assert survives(run, fragments, syncs + 1) == set(range(syncs + 1 - fragments, syncs + 2))


@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize(
    "operation",
    [90, *(pytest.param(at, marks=pytest.mark.slow) for at in range(70, 130) if at != 90)],
)
def test_of_a_run_that_was_killed_in_the_middle_of_a_sync(fragments, operation):
    run = Run(2, fragments)
    run.live((0, operation, "kill before"), (1, operation - 2, "kill before"), until=40)
    assert len(published(run)) >= 2 * (fragments + 1)
    survives(run, fragments, 10)


@pytest.mark.parametrize("fragments", [1, 2])
def test_however_often_it_is_resumed_nothing_piles_up(fragments):
    run, counts = Run(2, fragments), []
    for life in range(8):
        run.live(resume=life > 0, until=4 + life)
        counts.append(len(published(run)))
    assert not published(run, copies=True), "they are deleted with the first states"
    assert max(counts) <= 2 * (2 * fragments + 1)
    assert len(set(counts[2:])) == 1
    run.live(resume=True, until=11 + 3 * fragments)
    assert len(syncs_of(published(run))) == 2 * fragments + 1


@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize("harm", ["gone", "damaged"])
def test_before_its_first_outer_step_a_fragment_has_a_copy_of_its_state(
    fragments, harm, tmp_path, caplog
):
    """Whatever is lost, nothing is given up: the values are those that the run began with."""
    run = Run(2, fragments)
    run.live(until=fragments - 1 or -1)
    copies = published(run, copies=True)
    initial = [key for key in published(run) if kept(key).sync < fragments]
    assert copies == [copy_key(key) for key in initial]
    assert all(run.store.objects[copy_key(key)] == run.store.objects[key] for key in initial)
    expected = copy.deepcopy(run).live(resume=True)
    for key in [*initial, *copies]:
        again = copy.deepcopy(run)
        if harm == "gone":
            again.store.remove(key)
        else:
            again.store.damage(key, late_bit(again.store.objects[key]))
        caplog.clear()
        folder = in_folder(again, tmp_path / key.replace("/", "."))
        assert export(folder, tmp_path / "model") == fragments - 1
        assert identical([*again.live(resume=True), *expected])
        is_newest = key in initial and kept(key).sync == fragments - 1
        assert ("Its copy is used instead" in caplog.text) == is_newest
        if harm == "gone":  # a file of tensors needs the values alone
            assert ("Its copy is read instead" in caplog.text) == is_newest


@pytest.mark.parametrize("harm", ["state gone", "state damaged", "copy gone"])
@pytest.mark.parametrize("rank", [0, 1])
def test_who_resumes_the_run_writes_both_again(harm, rank):
    """Such as the copy that a process has not written before it was killed."""
    run = Run(2)
    run.live(until=-1)
    before = {key: run.store.objects[key] for key in [*published(run), *published(run, True)]}
    (key,) = published(run, rank=rank)
    if harm == "state damaged":
        run.store.damage(key, late_bit(run.store.objects[key]))
    else:
        run.store.remove(key if harm == "state gone" else copy_key(key))
    run.live(resume=True, until=-1)
    assert {key: run.store.objects.get(key) for key in before} == before


def test_who_was_replaced_meanwhile_writes_neither():
    """It hangs until the run was resumed without it, and has deleted its first states."""
    run, loading, hung = Run(2), [], []
    run.live(until=-1)
    (lost,) = published(run, copies=True, rank=1)
    run.store.remove(lost)

    def hang_when_all_is_read(process, kind, key):
        if process.number != 1 or hung:
            return
        if kind == "open" and kept(key).kind == "state":
            loading.append(key)
        elif loading:
            hung.append(process)
            process.sleep(5000.0)

    run.before = hang_when_all_is_read
    processes = [(rank, start, [], True) for start in (0.0, 2500.0) for rank in range(2)]
    results = run.simulate(processes, until=6)
    assert hung
    assert isinstance(results[1], RunExistsError)
    assert identical(results[2:])
    assert lost not in run.store.objects


@pytest.mark.parametrize("fragments", [1, 2])
def test_the_copies_are_deleted_with_the_first_states(fragments):
    run, deleted = Run(2, fragments), []
    run.store.after_delete = deleted.extend
    run.live(until=3 * fragments)
    assert published(run)
    assert not published(run, copies=True)
    assert syncs_of(keys_of(deleted, "state", copy=True)) == set(range(fragments))


def test_a_run_that_is_resumed_before_its_first_outer_step_deletes_the_copies_later():
    run = Run(2, 2)
    run.live(until=1)
    for until in (2, 3, 6):
        run.live(resume=True, until=until)
        assert syncs_of(published(run, copies=True)) == syncs_of(published(run)) & {0, 1}

"""The manifest of a fixed run that is resumed, and what is exported of such a run: lost, damaged,
or that of another run.
"""

import keys_lab
import pytest
from damage_lab import flip, late_bit
from keys_lab import MANIFEST, copy_key
from safetensors.torch import load_file
from strict_lab import Run, in_folder
from training_lab import identical

from diloco_core import CorruptedObjectError, RunExistsError, export


@pytest.fixture
def stopped(new_store):
    """A run of two ranks after three outer steps, whose replicas have left."""
    run = Run(2, store=new_store())
    run.live(until=3)
    return run


def manifests(run):
    """The key of the newest manifest, and that of its copy."""
    keys = keys_lab.newest(run.store.objects)
    (key,) = keys_lab.keys_of(keys, "manifest", copy=False)
    return key, copy_key(key)


def harm(run, key, how):
    if how == "gone":
        run.store.remove(key)
    else:
        run.store.damage(key, flip(run.store.objects[key], 4 * len(run.store.objects[key])))


@pytest.mark.parametrize("how", ["gone", "damaged"])
@pytest.mark.parametrize("incarnations", [1, 2])
@pytest.mark.parametrize("of", [0, 1], ids=["manifest", "copy"])
def test_one_of_the_two_is_enough(stopped, tmp_path, how, incarnations, of):
    if incarnations == 2:
        stopped.live(resume=True, until=5)
    both = manifests(stopped)
    assert stopped.store.objects[both[0]] == stopped.store.objects[both[1]]
    harm(stopped, both[of], how)
    steps = {1: 3, 2: 5}[incarnations]
    assert export(in_folder(stopped, tmp_path / "run"), tmp_path / "model") == steps
    seen = {}
    assert identical([*stopped.live(resume=True, seen=seen), *Run(2).live()])
    assert seen == dict.fromkeys(range(2), (steps, 2 * steps, 0))


@pytest.mark.parametrize("how", ["gone", "damaged"])
@pytest.mark.parametrize("resume", [True, "newest-whole", False])
def test_without_both_nothing_is_begun_or_exported(stopped, tmp_path, how, resume):
    both = manifests(stopped)
    for key in both:
        harm(stopped, key, how)
    before = dict(stopped.store.objects)
    with pytest.raises(CorruptedObjectError, match="put it back"):
        export(in_folder(stopped, tmp_path / "run"), tmp_path / "model")
    for result in stopped.live(resume=resume):
        with pytest.raises((CorruptedObjectError, RunExistsError), match=f"{MANIFEST}|resume=True"):
            raise result
    written = set(stopped.store.objects) - set(before)
    assert {keys_lab.kept(key).kind for key in written} <= {"note"}
    assert {key: stopped.store.objects[key] for key in before} == before
    assert max(stopped.ended.values()) < 30.0


def test_put_back_it_is_read_again(stopped):
    both = manifests(stopped)
    data = stopped.store.objects[both[0]]
    for key in both:
        stopped.store.remove(key)
    stopped.live(resume=True)
    stopped.store.write(both[0], data)
    assert identical([*stopped.live(resume=True), *Run(2).live()])


def test_a_copy_of_another_run_does_no_harm(stopped):
    other = Run(2)
    other.live(until=1)
    _, copy = manifests(stopped)
    stopped.store.objects[copy] = other.store.objects[MANIFEST]
    assert identical([*stopped.live(resume=True), *Run(2).live()])


def test_nor_is_it_believed_where_the_manifest_is_gone(stopped):
    other = Run(2)
    other.live(until=1)
    manifest, copy = manifests(stopped)
    stopped.store.objects[copy] = other.store.objects[MANIFEST]
    stopped.store.remove(manifest)
    for result in stopped.live(resume=True):
        assert isinstance(result, (CorruptedObjectError, RunExistsError)), result


@pytest.fixture
def run(new_store):
    """A run that was resumed twice, and has ended after six outer steps."""
    run = Run(2, store=new_store())
    run.live(until=3)
    run.live(resume=True, until=5)
    run.weights, _ = run.live(resume=True)
    return run


def test_the_newest_state_is_exported(run, tmp_path):
    assert export(in_folder(run, tmp_path / "run"), tmp_path / "model") == 6
    assert identical([load_file(tmp_path / "model"), run.weights])


@pytest.mark.parametrize(("how", "shard"), [("damaged", 0), ("zeros", 1)])
def test_the_one_before_where_the_newest_one_is_not_whole(run, tmp_path, how, shard):
    keys = keys_lab.newest(run.store.objects)
    (key,) = keys_lab.keys_of(keys, "state", sync=6, rank=shard)
    run.store.damage(key, late_bit(run.store.objects[key] if how == "damaged" else bytes(99)))
    assert export(in_folder(run, tmp_path / "run"), tmp_path / "model") == 5
    weights, other = run.live(resume="newest-whole", until=5)
    assert identical([load_file(tmp_path / "model"), weights, other])

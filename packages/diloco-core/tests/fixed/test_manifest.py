"""The manifest of a fixed run: lost, damaged, that of another run; and who writes it again."""

from functools import cache

import keys_lab
import pytest
import torch
from damage_lab import flip
from keys_lab import MANIFEST, copy_key
from strict_lab import Run, in_folder
from training_lab import Clock, fill, identical, push

from diloco_core import (
    CorruptedObjectError,
    DiLoCo,
    Elastic,
    RunExistsError,
    Timing,
    connect,
    export,
)


@pytest.fixture
def stopped(new_store):
    """A run of two ranks after three outer steps, whose replicas have left."""
    run = Run(2, store=new_store())
    run.live(until=3)
    return run


@cache
def whole():
    return Run(2).live()


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


@pytest.mark.sampled
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
    assert identical([*stopped.live(resume=True, seen=seen), *whole()])
    assert seen == dict.fromkeys(range(2), (steps, 2 * steps, 0))


@pytest.mark.sampled
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
    assert identical([*stopped.live(resume=True), *whole()])


def test_a_copy_of_another_run_does_no_harm(stopped):
    other = Run(2)
    other.live(until=1)
    _, copy = manifests(stopped)
    stopped.store.objects[copy] = other.store.objects[MANIFEST]
    assert identical([*stopped.live(resume=True), *whole()])


def test_nor_is_it_believed_where_the_manifest_is_gone(stopped):
    other = Run(2)
    other.live(until=1)
    manifest, copy = manifests(stopped)
    stopped.store.objects[copy] = other.store.objects[MANIFEST]
    stopped.store.remove(manifest)
    for result in stopped.live(resume=True):
        assert isinstance(result, (CorruptedObjectError, RunExistsError)), result


HARM = {
    "gone": lambda data: None,
    "damaged": lambda data: flip(data, 4 * len(data)),
    "empty": lambda data: b"",
}


def harmed(run, harm):
    """Harm the manifest when sync 4 is decided.

    For each later record of a sync: whether the manifest was whole.
    """
    whole, found = {}, []

    def before(_, kind, key):
        if kind not in {"put", "create"} or not keys_lab.of("commit")(key):
            return
        sync = keys_lab.kept(key).sync
        (manifest,) = keys_lab.keys_of(
            keys_lab.newest(whole or run.store.objects), "manifest", copy=False
        )
        if sync == 5 and not whole:
            whole.update({manifest: run.store.objects[manifest]})
            run.store.remove(manifest)
            if (data := HARM[harm](whole[manifest])) is not None:
                run.store.damage(manifest, data)
        if sync > 5:
            found.append(run.store.objects.get(manifest) == whole[manifest])

    run.before = before
    return found


@pytest.mark.sampled
@pytest.mark.parametrize("until", [6, 11], ids=["when they leave", "at every eighth sync"])
@pytest.mark.parametrize("harm", HARM)
def test_it_is_written_again(stopped, harm, until, caplog):
    found = harmed(stopped, harm)
    assert identical(stopped.live(resume=True, until=until))
    if until == 11:
        assert found[:3] == [False] * 3
        assert found[-1]
    assert "Writing it again with the same content" in caplog.text
    stopped.before = None
    assert identical(stopped.live(resume=True, until=12))


@pytest.mark.parametrize("kind", ["fixed", "elastic"])
def test_a_run_goes_on_without_a_copy_that_cannot_be_written(kind, tmp_path, caplog):
    clock, folder = Clock(), tmp_path / "run"
    timing = Timing(clock=clock, sleep=clock.sleep)
    options = {"elastic": Elastic(1, grace=600.0)} if kind == "elastic" else {}
    net = fill(torch.nn.Linear(2, 1))
    inner = torch.optim.SGD(net.parameters(), lr=0.5)
    exchange = connect(folder, rank=0, world_size=1, timing=timing, **options)
    with DiLoCo(net, inner, exchange, sync_every=1) as outer:
        copy = folder / copy_key(MANIFEST)
        copy.unlink()
        (copy / "something").mkdir(parents=True)
        for step in range(9):
            push(net, inner, 0, step)
    assert outer.committed == 9
    assert "goes on without this copy of its manifest" in caplog.text

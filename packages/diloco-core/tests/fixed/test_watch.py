"""The replicas of a living fixed run write its manifest again when that is lost or damaged."""

import keys_lab
import pytest
import torch
from damage_lab import flip
from keys_lab import MANIFEST, copy_key
from strict_lab import Run
from training_lab import Clock, fill, identical, push

from diloco_core import DiLoCo, Elastic, Timing, connect

HARM = {
    "gone": lambda data: None,
    "damaged": lambda data: flip(data, 4 * len(data)),
    "empty": lambda data: b"",
}


@pytest.fixture
def run(new_store):
    """A run of two ranks after three outer steps, whose replicas have left."""
    run = Run(2, store=new_store())
    run.live(until=3)
    return run


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


@pytest.mark.parametrize("until", [6, 11], ids=["when they leave", "at every eighth sync"])
@pytest.mark.parametrize("harm", HARM)
def test_it_is_written_again(run, harm, until, caplog):
    found = harmed(run, harm)
    assert identical(run.live(resume=True, until=until))
    if until == 11:
        assert found[:3] == [False] * 3
        assert found[-1]
    assert "Writing it again with the same content" in caplog.text
    run.before = None
    assert identical(run.live(resume=True, until=12))


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

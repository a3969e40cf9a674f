"""What is exported of a fixed run that was resumed is the state from which it is resumed."""

import keys_lab
import pytest
from damage_lab import late_bit
from keys_lab import MANIFEST, copy_key
from safetensors.torch import load_file
from strict_lab import Run, in_folder
from training_lab import identical

from diloco_core import CorruptedObjectError, export


@pytest.fixture
def run(new_store):
    """A run that was resumed twice, and has ended after six outer steps."""
    run = Run(2, store=new_store())
    run.live(until=3)
    run.live(resume=True, until=5)
    run.weights, _ = run.live(resume=True)
    return run


def states(run):
    return keys_lab.keys_of(keys_lab.newest(run.store.objects), "state")


def test_the_newest_state(run, tmp_path):
    assert export(in_folder(run, tmp_path / "run"), tmp_path / "model") == 6
    assert identical([load_file(tmp_path / "model"), run.weights])


@pytest.mark.parametrize("harm", ["damaged", "gone"])
@pytest.mark.parametrize("shard", [0, 1])
def test_the_one_before_where_the_newest_one_is_not_whole(run, tmp_path, harm, shard):
    key = next(key for key in states(run) if keys_lab.kept(key)[1:3] == (6, shard))
    if harm == "damaged":
        run.store.damage(key, late_bit(run.store.objects[key]))
    else:
        run.store.remove(key)
    assert export(in_folder(run, tmp_path / "run"), tmp_path / "model") == 5
    weights, other = run.live(resume="newest-whole", until=5)
    assert identical([load_file(tmp_path / "model"), weights, other])


@pytest.mark.parametrize("harm", ["torn", "gone"])
def test_without_manifests_nothing_is_exported(run, tmp_path, harm):
    folder = in_folder(run, tmp_path / "run")
    newest = next(key for key in keys_lab.newest(run.store.objects) if key.endswith(MANIFEST))
    for key in (newest, copy_key(newest)):
        if harm == "gone":
            (folder / key).unlink()
        else:
            (folder / key).write_text("torn")
    with pytest.raises(CorruptedObjectError, match=f"{newest}.*put it back"):
        export(folder, tmp_path / "model")

"""Which state a strict run is continued from, and that it is the one that is exported."""

import keys_lab
import pytest
from damage_lab import late_bit
from keys_lab import copy_key
from safetensors.torch import load_file
from strict_lab import Run, in_folder
from training_lab import identical

from diloco_core import (
    CorruptedObjectError,
    export,
)


def rebuilt(run, damaged):
    """The same run in another store, with one damaged object."""
    other = Run(run.ranks, run.fragments, run.adam, run.syncs)
    for key, data in run.store.objects.items():
        other.store.write(key, late_bit(data) if key == damaged else data)
    return other


EVIDENCE = {
    "the record of the next sync": lambda run, life: keys_lab.commit_key(run, 4),
    "a contribution to the next sync": lambda run, life: keys_lab.contribution_key(run, 4, 0),
    "a shard of the next sync": lambda run, life: keys_lab.state_key(run, 4, 0),
    "inner state after the sync": lambda run, life: keys_lab.inner_key(run, 3, 0, life),
}


@pytest.mark.parametrize("evidence", EVIDENCE)
@pytest.mark.parametrize("of", ["this life", "an earlier life", "another run"])
def test_a_shard_is_missed_where_something_that_counts_shows_that_it_was_there(evidence, of):
    """The run was killed in sync 3. If nobody has finished that, it goes on from sync 2, and nothing is lost."""
    run = Run(2)
    run.live(until=1)
    run.live(until=3, resume=True)
    gone = {"note", "inner", "contribution"}
    for key in [key for key in run.store.objects if keys_lab.kept(key).kind in gone]:
        run.store.remove(key)
    lost = keys_lab.keys_of(run.store.objects, "state", rank=1)[-1]
    assert keys_lab.kept(lost).sync == 3
    run.store.remove(lost)
    life = {"this life": 2, "an earlier life": 1, "another run": 2}[of]
    name = keys_lab.name_in(run.store.objects[keys_lab.manifest_key(life)], life)
    name = 16 * "f" if of == "another run" else name
    run.store.write(EVIDENCE[evidence](name, life), b"whatever it holds")
    seen = {}
    results = run.live(resume=True, seen=seen)
    if of == "this life":
        with pytest.raises(CorruptedObjectError, match=f"is incomplete: {lost} missing"):
            raise results[0]
    else:
        assert identical(results)
        assert {place[:2] for place in seen.values()} == {(2, 4)}


def test_what_is_exported_is_what_is_resumed(tmp_path, caplog):
    run = Run(2)
    run.live(until=3)
    run.live(resume=True, until=5)
    (weights, *_) = run.live(resume=True)
    folder = in_folder(run, tmp_path / "run")
    assert export(folder, tmp_path / "model") == 6
    assert identical([load_file(tmp_path / "model"), weights])
    newest = keys_lab.keys_of(run.store.objects, "state")[-1]
    third = keys_lab.manifest_key(3)
    (folder / newest).write_bytes(late_bit(run.store.objects[newest]))
    assert export(folder, tmp_path / "model") == 5
    (weights, *_) = rebuilt(run, newest).live(resume="newest-whole", until=5)
    assert identical([load_file(tmp_path / "model"), weights])
    for key in (third, copy_key(third)):
        (folder / key).write_text("torn")
    with pytest.raises(CorruptedObjectError, match=third):
        export(folder, tmp_path / "model")
    for key in (third, copy_key(third)):
        (folder / key).unlink()
    with pytest.raises(CorruptedObjectError, match=r"no manifest says so.*put it back"):
        export(folder, tmp_path / "model")

"""Which state a strict run is continued from, and that it is the one that is exported."""

import pytest
from damage_lab import late_bit
from safetensors.torch import load_file
from strict_lab import Run, in_folder, manifest
from training_lab import identical

from diloco_core import (
    CorruptedObjectError,
    export,
)
from diloco_core._strict._records._manifest import cut
from diloco_core._strict._states import keys_of, states, syncs_before


def rebuilt(run, damaged):
    """The same run in another store, with one damaged object."""
    other = Run(run.ranks, run.fragments, run.adam, run.syncs)
    for key, data in run.store.objects.items():
        other.store.write(key, late_bit(data) if key == damaged else data)
    return other


class TestTheChoice:
    """Which syncs of which life count, and which state is the newest."""

    def test_lives_are_cut_where_a_later_one_goes_on(self):
        base = manifest([(32 * "a", 3), (32 * "b", 5)])
        assert cut(base, 9) == [(32 * "a", 3), (32 * "b", 5), (32 * "c", 9)]
        assert cut(base, 5) == [(32 * "a", 3), (32 * "b", 5), (32 * "c", 5)]
        assert cut(base, 4) == [(32 * "a", 3), (32 * "b", 4), (32 * "c", 4)]
        assert cut(base, 2) == [(32 * "a", 2), (32 * "b", 2), (32 * "c", 2)]
        again = manifest(cut(base, 4))
        assert [again.run_of(sync)[0] for sync in (3, 4, 5)] == list("abc")
        assert [base.run_of(sync)[0] for sync in (0, 3, 4, 5, 6)] == list("aabbc")

    def test_objects_of_other_lives_do_not_count(self):
        base = manifest([(32 * "a", 3)])
        ours = keys_of(base, 0, 3) + keys_of(base, 0, 4)
        late = [key.replace(16 * "c", 16 * "a") for key in keys_of(base, 0, 5)]
        found = states(base, [*ours, *late], [], [])
        assert (found.whole, found.least) == ([4, 3], 3)

    def test_a_sync_shows_that_the_one_before_was_whole(self):
        base = manifest()
        commits = [f"commits/00000007.{16 * 'c'}.json", f"commits/00000009.{16 * 'd'}.json"]
        assert states(base, keys_of(base, 0, 2), commits, [5]) == states(
            base, keys_of(base, 0, 2), commits, []
        )
        found = states(base, keys_of(base, 0, 2), commits, [9])
        assert (found.whole, found.least) == ([2], 8)

    def test_who_contributes_or_saves_inner_state_has_finished_the_syncs_before(self):
        base = manifest([(32 * "a", 3)])
        counts, late = 16 * "c", 16 * "a"
        contributions = [
            f"deltas/{sync:08}/00001.{run}.{16 * '0'}.1.safetensors"
            for sync, run in ((5, counts), (9, late), (3, late), (7, 16 * "f"))
        ]
        saved = [
            f"inner/00000/{sync:08}.{run}.0002.safetensors"
            for sync, run in ((4, counts), (9, late), (2, late), (7, 16 * "f"))
        ]
        assert syncs_before(base, [*contributions, "deltas/x"], [*saved, "inner/x"]) == [5, 3, 5, 3]

    @pytest.mark.parametrize(("committed", "last"), [(0, [6, 5]), (1, [5, 6])])
    def test_turns_go_on_from_the_steps_before_the_run(self, committed, last):
        base = manifest(fragments=2)
        base.settings["committed"] = str(committed)
        assert base.last_syncs(6) == last
        assert base.last_syncs(1) == [0, 1]


def test_what_is_exported_is_what_is_resumed(tmp_path, caplog):
    run = Run(2)
    run.live(until=3)
    run.live(resume=True, until=5)
    (weights, *_) = run.live(resume=True)
    folder = in_folder(run, tmp_path / "run")
    assert export(folder, tmp_path / "model") == 6
    assert identical([load_file(tmp_path / "model"), weights])
    newest = max(key for key in run.store.objects if key.startswith("state/"))
    (folder / newest).write_bytes(late_bit(run.store.objects[newest]))
    assert export(folder, tmp_path / "model") == 5
    (weights, *_) = rebuilt(run, newest).live(resume="newest-whole", until=5)
    assert identical([load_file(tmp_path / "model"), weights])
    for key in ("manifests/0003.json", "manifests/0003.copy.json"):
        (folder / key).write_text("torn")
    with pytest.raises(CorruptedObjectError, match=r"manifests/0003\.json"):
        export(folder, tmp_path / "model")
    for key in ("manifests/0003.json", "manifests/0003.copy.json"):
        (folder / key).unlink()
    with pytest.raises(CorruptedObjectError, match=r"no manifest says so.*put it back"):
        export(folder, tmp_path / "model")

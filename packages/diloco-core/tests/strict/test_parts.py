"""Parts of strict runs by themselves. What they do for users is shown by the other files of this folder."""

import pytest

from diloco_core._strict._old_states import OldStates
from diloco_core._strict._records._manifest import Manifest, cut
from diloco_core._strict._states import keys_of, states, syncs_before


def manifest(earlier=(), ranks=2, fragments=1):
    tables = [{"shards": ranks} for _ in range(fragments)]
    members = [(1, f"nonce {rank}") for rank in range(ranks)]
    settings = {"committed": "0"}
    return Manifest("", 32 * "c", ranks, settings, {}, tables, {}, members, list(earlier))


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


def test_what_is_kept_of_three_fragments():
    states = OldStates(3)
    superseded = [states.supersede([f"of sync {sync}"]) for sync in range(6)]
    assert superseded == [[], [], [], ["of sync 0"], ["of sync 1"], ["of sync 2"]]
    assert OldStates(0).supersede(["a mean"]) == ["a mean"]
    assert OldStates(1, [["the one before"]]).supersede(["the last one"]) == ["the one before"]

"""Test who computes which shard of a committed sync, and when."""

import pytest

from diloco_core._run._round._shares import Shares, inputs_are_superseded

_SHARES = Shares(sync=4, members=(0, 2, 3), rank=2, grace=10.0)
_MENDING = Shares(4, (0, 2, 3), 2, 10.0, mending=True)


def test_every_shard_has_one_owner():
    shares = [Shares(4, (0, 2, 3), rank, 10.0) for rank in (0, 2, 3)]
    assert [each.own(range(6)) for each in shares] == [[0, 3], [1, 4], [2, 5]]
    assert Shares(4, (0, 2, 3), 1, 10.0).own(range(6)) == []
    assert [each.designated for each in shares] == [False, True, False]


def test_who_does_the_work_of_one_that_is_late():
    turns = {rank: Shares(4, (0, 2, 3), rank, 10.0).turn(0) for rank in (0, 1, 2, 3)}
    assert turns[2] == 10.0 < turns[3] < turns[1] < 12.0
    assert Shares(4, (0, 2, 3), 0, 10.0).turn(0) < 10.0, "an owner that has looked for it first"


@pytest.mark.parametrize(("elapsed", "late"), [(9.9, []), (10.0, [0]), (60.0, [0, 2])])
def test_what_is_late_is_computed(elapsed, late):
    assert _SHARES.late([0, 2], elapsed) == late


def test_whoever_cannot_compute_waits_until_all_others_had_their_turn():
    assert _SHARES.patience((0, 2)) == 20.0 + _SHARES.turn(2) - 10.0


def test_what_was_published_once_is_for_whoever_comes_first():
    assert _MENDING.own(range(6)) == []
    assert _MENDING.late([0, 1], 0.0) == [0, 1]


def test_owners_that_are_late_are_not_waited_for_in_the_next_sync():
    assert _SHARES.late_owners((0, 2), 9.9) == set()
    assert _SHARES.late_owners((0, 1, 3), 10.0) == {0}


@pytest.mark.parametrize(
    ("newest", "mending", "superseded"),
    [(5, False, True), (5, True, True), (4, False, True), (4, True, False), (3, False, False)],
)
def test_inputs_go_when_newer_state_is_complete(newest, mending, superseded):
    assert inputs_are_superseded(newest, 4, mending=mending) is superseded

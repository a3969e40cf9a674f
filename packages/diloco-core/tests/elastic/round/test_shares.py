"""Who computes which shard of a committed sync, and when."""

import pytest

from diloco_core._run._round._shares import (
    Adopt,
    Complete,
    Compute,
    GiveUp,
    KeepWaiting,
    LookAgain,
    Pending,
    Shares,
    inputs_are_superseded,
    on_pending,
)

_SHARES = Shares(sync=4, members=(0, 2, 3), rank=2, grace=10.0)


def _seen(pending, elapsed=0.0, patience=30.0, shares=_SHARES):
    return on_pending(shares, pending, elapsed=elapsed, patience=patience)


def test_every_shard_has_one_owner():
    shares = [Shares(4, (0, 2, 3), rank, 10.0) for rank in (0, 2, 3)]
    assert [each.own(range(6)) for each in shares] == [[0, 3], [1, 4], [2, 5]]
    assert Shares(4, (0, 2, 3), 1, 10.0).own(range(6)) == []
    assert [each.designated for each in shares] == [False, True, False]


def test_the_next_member_does_the_work_of_one_that_is_late_and_a_bystander_comes_last():
    turns = {rank: Shares(4, (0, 2, 3), rank, 10.0).turn(0) for rank in (0, 1, 2, 3)}
    assert turns[2] == 10.0 < turns[3] < turns[1] < 12.0
    assert Shares(4, (0, 2, 3), 0, 10.0).turn(0) < 10.0, "an owner that has looked for it first"


def test_what_was_published_once_is_for_whoever_comes_first():
    mending = Shares(4, (0, 2, 3), 2, 10.0, mending=True)
    assert mending.own(range(6)) == []
    assert _seen(Pending((0, 1)), shares=mending) == Compute((0, 1))


def test_what_is_published_comes_first():
    assert _seen(Pending((0, 2), published=(2,)), elapsed=60.0) == Adopt((2,))


def test_then_what_its_owner_is_late_with():
    assert _seen(Pending((0, 2)), elapsed=9.9) == KeepWaiting()
    assert _seen(Pending((0, 2)), elapsed=10.0) == Compute((0,))
    assert _seen(Pending((0, 2)), elapsed=60.0) == Compute((0, 2))


def test_where_something_has_come_it_looks_again_at_once():
    assert _seen(Pending((0,), arrived=True)) == LookAgain()
    assert _seen(Pending((), arrived=True)) == Complete()


def test_what_it_cannot_compute_is_left_to_others_for_a_while():
    shares = Shares(4, (0, 2, 3), 2, 10.0)
    patience = shares.patience((0, 2))
    assert patience == 20.0 + shares.turn(2) - 10.0
    unreadable = Pending((0,), readable=False)
    assert _seen(unreadable, elapsed=patience - 0.1, patience=patience) == KeepWaiting()
    assert _seen(unreadable, elapsed=patience, patience=patience) == GiveUp()
    seen = Pending((0,), arrived=True, readable=False)
    assert _seen(seen, elapsed=patience, patience=patience) == LookAgain()


def test_owners_that_are_late_are_not_waited_for_in_the_next_sync():
    assert _SHARES.late_owners((0, 2), 9.9) == set()
    assert _SHARES.late_owners((0, 1, 3), 10.0) == {0}


@pytest.mark.parametrize(
    ("newest", "mending", "superseded"),
    [(5, False, True), (5, True, True), (4, False, True), (4, True, False), (3, False, False)],
)
def test_inputs_go_when_newer_state_is_complete(newest, mending, superseded):
    assert inputs_are_superseded(newest, 4, mending=mending) is superseded

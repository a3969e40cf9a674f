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


PATIENCE = _SHARES.patience((0, 2))
SEEN = {
    "what is published comes first": (Pending((0, 2), published=(2,)), 60.0, Adopt((2,))),
    "its owner has time": (Pending((0, 2)), 9.9, KeepWaiting()),
    "its owner is late": (Pending((0, 2)), 10.0, Compute((0,))),
    "and then the others": (Pending((0, 2)), 60.0, Compute((0, 2))),
    "something has come": (Pending((0,), arrived=True), 0.0, LookAgain()),
    "all has come": (Pending((), arrived=True), 0.0, Complete()),
    "unreadable, which others have": (Pending((0,), readable=False), PATIENCE - 0.1, KeepWaiting()),
    "unreadable for long": (Pending((0,), readable=False), PATIENCE, GiveUp()),
    "but not all": (Pending((0,), arrived=True, readable=False), PATIENCE, LookAgain()),
}


@pytest.mark.parametrize(("pending", "elapsed", "decided"), SEEN.values(), ids=SEEN)
def test_what_is_done_about_pending_shards(pending, elapsed, decided):
    assert 20.0 + _SHARES.turn(2) - 10.0 == PATIENCE
    assert on_pending(_SHARES, pending, elapsed=elapsed, patience=PATIENCE) == decided


def test_what_was_published_once_is_for_whoever_comes_first():
    assert _MENDING.own(range(6)) == []
    mended = on_pending(_MENDING, Pending((0, 1)), elapsed=0.0, patience=30.0)
    assert mended == Compute((0, 1))


def test_owners_that_are_late_are_not_waited_for_in_the_next_sync():
    assert _SHARES.late_owners((0, 2), 9.9) == set()
    assert _SHARES.late_owners((0, 1, 3), 10.0) == {0}


@pytest.mark.parametrize(
    ("newest", "mending", "superseded"),
    [(5, False, True), (5, True, True), (4, False, True), (4, True, False), (3, False, False)],
)
def test_inputs_go_when_newer_state_is_complete(newest, mending, superseded):
    assert inputs_are_superseded(newest, 4, mending=mending) is superseded

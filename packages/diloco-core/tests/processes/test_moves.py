"""Test what the leader of a replica tells its other processes, and what they tell it."""

import math
import pickle

import pytest

from diloco_core import SyncError
from diloco_core._errors import ReplicaLostError
from diloco_core._processes._moves import check_alike, check_steps, failed


class OddError(Exception):
    """Can be made in one way only, and not be sent."""

    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")
        self.both = lambda: (one, two)


def sent(error):
    return pickle.loads(pickle.dumps(failed(error))).error()


@pytest.mark.parametrize(
    "error",
    [SyncError("why"), ValueError(3), SystemExit(143), ReplicaLostError("rank 1 was lost", 1)],
    ids=lambda error: type(error).__name__,
)
def test_an_error_arrives_as_it_was_raised(error):
    arrived = sent(error)
    assert type(arrived) is type(error)
    assert (str(arrived), arrived.args, arrived.__dict__) == (
        str(error),
        error.args,
        error.__dict__,
    )


def test_an_error_that_cannot_be_sent_arrives_with_its_words():
    arrived = sent(OddError("this", "that"))
    assert type(arrived) is SyncError
    assert str(arrived) == "OddError: this and that"


def test_processes_that_have_taken_other_steps_are_named():
    check_steps({0: 4, 1: 4})
    with pytest.raises(SyncError, match="process 0: 4, process 1: 5"):
        check_steps({0: 4, 1: 5})


@pytest.mark.parametrize(
    "moved",
    [
        [(), ()],
        [(0.0,), (0.0,)],
        [(1.0, -2.0), (1.0, -2.1), (1.0, -2.2)],
        [(math.nan,), (1.0,), (1.0,)],
    ],
    ids=["sharded", "idle", "rounded", "nan"],
)
def test_processes_that_train_together_may_go_on(moved):
    check_alike(*samples(moved))


@pytest.mark.parametrize(
    "moved",
    [[(1.0, -2.0), (1.0, -2.0), (1.0, -2.3)], [(0.0, 0.0), (0.0, 0.0), (0.0, 1e-9)]],
    ids=["apart", "one moves"],
)
def test_a_process_that_trains_apart_is_named(moved):
    with pytest.raises(SyncError, match="process 2 of this replica has trained its model to other"):
        check_alike(*samples(moved))


def samples(moved):
    """The values of processes that have moved by so much, and what they were before."""
    before = [0.5] * len(moved[0])
    return [{0: [0.5 + way for way in each]} for each in moved], {0: before}

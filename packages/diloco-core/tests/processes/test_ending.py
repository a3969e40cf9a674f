"""Test how the processes of a replica end together."""

import subprocess
import sys
import time

import pytest
from torch.distributed import DistBackendError

from diloco_core._loop._inner_loop import TrainingProcess
from diloco_core._processes import _ending
from diloco_core._processes._ending import Ending


class Alone:
    """A process of a replica that never meets the others, in place of :class:`.Inside`."""

    leads = True

    def __init__(self, process, processes):
        self.process, self.processes = process, processes

    def share(self, message):
        return message

    def collect(self, message):
        return [message]

    def together(self, act):
        return act()


def boards(processes):
    """Return what ends each process, which has taken 3 steps."""
    first, *others = (
        Ending(Alone(number, processes), TrainingProcess(), lambda: 3)
        for number in range(processes)
    )
    memory = ("_texts", "_at", "_told", "_known_at", "_failed_at")
    for each in others:
        vars(each).update({name: getattr(first, name) for name in memory})
    return [first, *others]


def test_the_first_that_fails_is_named_to_all():
    first, second, third = boards(3)
    assert first.failure() is None
    third.fail(ValueError("no data"))
    second.fail(ValueError("later"))
    for each in (first, second, third):
        error = each.failure()
        assert error.process == 2
        assert str(error) == "process 2 of this replica has failed: ValueError: no data"


def test_only_a_process_that_is_behind_is_said_not_to_answer():
    first, second = boards(2)
    first._at[:] = 7
    assert first.failure(late=True) is None
    first._at[0] = 12
    assert first.failure() is None
    error = second.failure(late=True)
    assert error.process == 1
    assert "it does not answer. It has taken 7 inner steps inside the block" in str(error)


def test_a_text_that_cannot_be_written_is_written_as_far_as_it_can():
    (board,) = boards(1)
    board.fail(ValueError("\udcff is no text"))
    assert str(board.failure()).endswith(" has failed: ValueError: ? is no text")


def test_all_end_after_the_last_step_that_any_has_taken_or_at_once_if_one_has_failed():
    first, second, third = boards(3)
    assert [first.agree(3), second.agree(7)] == [None, None]
    assert first.failure() is None, "it is answered while others are waited for"
    assert [third.agree(5), first.agree(3)] == [8, 8]
    third.fail(ValueError("no data"))
    assert first.agree(3) == 0


def test_for_a_process_that_was_killed_nobody_waits():
    first, second = boards(2)
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        pass
    assert first.agree(3) is None
    first._pids[1] = gone.pid
    assert first.agree(3) == 0
    second.agree(3)
    assert first.agree(3) == 4, "it had told its steps"


def test_a_process_that_has_never_entered_the_block_does_not_answer():
    first, _ = boards(2)
    first._at[0] = 5
    assert "It has taken 0 inner steps inside the block" in str(first.failure(late=True))


def test_who_has_failed_is_known_when_that_process_is_gone():
    first, second = boards(2)
    first.fail(ValueError("x" * 5000))
    del first
    assert len(str(second.failure())) < 2100


GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer"


@pytest.mark.parametrize("error", [RuntimeError(GLOO), DistBackendError("NCCL error")])
def test_a_broken_collective_is_explained_by_whoever_has_failed(error, monkeypatch):
    first, second = boards(2)
    first.fail(error)
    assert first.failure() is None, "it was not the first to fail"
    looks = []

    def pause(_):
        looks.append(first.cause(ValueError("its own")))
        if len(looks) == 3:
            second.fail(ValueError("no data"))

    monkeypatch.setattr(_ending.time, "sleep", pause)
    assert "has failed: ValueError: no data" in str(first.cause(error))
    assert list(map(str, looks)) == ["its own"] * 3


def test_a_process_that_was_killed_is_named_instead_of_the_collective_that_it_broke():
    first, _ = boards(2)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    first._pids[1] = gone.pid
    assert str(first.cause(RuntimeError(GLOO))) == (
        f"process 1 of this replica has failed: it is gone (pid {gone.pid}): it was killed, or "
        "ended without saying why"
    )
    first.fail(ValueError("no data"))
    assert "process 0 of this replica has failed: ValueError" in str(first.broken_by())


def test_a_collective_that_nobody_has_broken_keeps_its_error(monkeypatch):
    (board,) = boards(1)
    monkeypatch.setattr(_ending.time, "sleep", bool)
    error = RuntimeError(GLOO)
    assert board.cause(error) is error


def test_it_is_gone_when_the_block_is_left():
    first, _ = boards(2)
    first._process.told_to_end = True
    first.start()
    while not first._known_at[0]:
        time.sleep(0.01)
    first.stop()
    assert not first._thread.is_alive(), "it waits for the other process"

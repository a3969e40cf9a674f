"""What the processes of a replica let each other know, and what a stranger may write there."""

import pytest
from torch.distributed import DistBackendError, TCPStore

from diloco_core._processes import _board
from diloco_core._processes._board import Board


class Alone:
    """A replica whose processes never meet, in place of :class:`.Inside`."""

    leads = True

    def __init__(self, process=0, processes=1, port=None):
        self.process, self.processes, self._port = process, processes, port
        self.leads = process == 0

    def share(self, port):
        return port or self._port


def boards(processes):
    """Return the board as each process has it."""
    first = Board(Alone(0, processes))
    port = first._store.port
    return [first, *(Board(Alone(number, processes, port)) for number in range(1, processes))]


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
    first.note(7)
    second.note(7)
    assert first.failure(late=True) is None
    first.note(12)
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
    assert [first.last_step(3), second.last_step(7)] == [None, None]
    assert first.failure() is None, "it is answered while others are waited for"
    assert [third.last_step(5), first.last_step(3)] == [8, 8]
    third.fail(ValueError("no data"))
    assert first.last_step(3) == 0


@pytest.mark.parametrize("text", ["", "x y", "9" * 5000, "\udcff"])
def test_what_a_stranger_writes_names_no_process(text):
    (board,) = boards(1)
    stranger = TCPStore("localhost", board._store.port, is_master=False)
    stranger.set("failed", text.encode(errors="surrogateescape"))
    assert board.failure(late=True) is None


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

    monkeypatch.setattr(_board.time, "sleep", pause)
    assert "has failed: ValueError: no data" in str(first.cause(error))
    assert list(map(str, looks)) == ["its own"] * 3


def test_a_collective_that_nobody_has_broken_keeps_its_error(monkeypatch):
    (board,) = boards(1)
    monkeypatch.setattr(_board.time, "sleep", bool)
    error = RuntimeError(GLOO)
    assert board.cause(error) is error

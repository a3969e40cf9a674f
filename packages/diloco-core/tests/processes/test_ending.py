"""How the processes of a replica end together, and what a stranger may write there."""

import pytest
from torch.distributed import DistBackendError, TCPStore

from diloco_core._loop._inner_loop import TrainingProcess
from diloco_core._processes import _ending
from diloco_core._processes._ending import Ending


class Alone:
    """A replica whose processes never meet, in place of :class:`.Inside`."""

    leads = True

    def __init__(self, process=0, processes=1, port=None):
        self.process, self.processes, self._port = process, processes, port
        self.leads = process == 0

    def share(self, port):
        return port or self._port


def boards(processes):
    """Return what ends each process, which has taken 3 steps."""

    def made(number, port=None):
        return Ending(Alone(number, processes, port), TrainingProcess(), lambda: 3)

    first = made(0)
    return [first, *(made(number, first._store.port) for number in range(1, processes))]


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
    first._store.set("at/0", "7")
    first._store.set("at/1", "7")
    assert first.failure(late=True) is None
    first._store.set("at/0", "12")
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

    monkeypatch.setattr(_ending.time, "sleep", pause)
    assert "has failed: ValueError: no data" in str(first.cause(error))
    assert list(map(str, looks)) == ["its own"] * 3


def test_a_collective_that_nobody_has_broken_keeps_its_error(monkeypatch):
    (board,) = boards(1)
    monkeypatch.setattr(_ending.time, "sleep", bool)
    error = RuntimeError(GLOO)
    assert board.cause(error) is error


def test_it_is_gone_when_the_block_is_left():
    first, second = boards(2)
    first._process.told_to_end = True
    first.start()
    second._store.wait(["taken/0"])
    first.stop()
    assert not first._thread.is_alive(), "it would talk to the store while Python ends"

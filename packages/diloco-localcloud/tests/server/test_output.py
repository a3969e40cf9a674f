"""What programs write, line by line."""

import os
import threading

import pytest

from diloco_localcloud._server._output import read_lines


@pytest.fixture
def pipes():
    return [os.pipe(), os.pipe()]


def test_whole_lines_of_each_pipe_and_the_rest_at_the_end(pipes):
    got, told = [], threading.Semaphore(0)

    def write(number, text):
        got.append((number, text))
        told.release()

    (first, into_first), (second, into_second) = pipes
    thread = threading.Thread(target=read_lines, args=([first, second], write), daemon=True)
    thread.start()
    os.write(into_first, b"one\ntw")
    assert told.acquire(timeout=60), got
    os.write(into_second, b"other\n")
    assert told.acquire(timeout=60), got
    os.write(into_first, b"o\nthr\xff")
    assert told.acquire(timeout=60), got
    os.close(into_first)
    assert told.acquire(timeout=60), got
    os.close(into_second)
    thread.join()
    assert got == [(0, b"one\n"), (1, b"other\n"), (0, b"two\n"), (0, b"thr\xff")]
    for pipe in (first, second):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(pipe)


def test_what_was_begun_of_a_line_comes_when_nothing_follows(pipes):
    """But for the begin of a character."""
    got, told = [], threading.Semaphore(0)

    def write(number, text):
        got.append((number, text))
        told.release()

    (first, into_first), (second, into_second) = pipes
    thread = threading.Thread(
        target=read_lines, args=([first, second], write), kwargs={"idle_seconds": 0.01}, daemon=True
    )
    thread.start()
    for data in (b"one\ntw", b"o\xc3", b"\xa9\n", b"end"):
        os.write(into_first, data)
        for _ in range(2 if data.startswith(b"one") else 1):
            assert told.acquire(timeout=60), got
    os.close(into_second)
    os.close(into_first)
    thread.join()
    assert got == [(0, b"one\n"), (0, b"tw"), (0, b"o"), (0, "\u00e9\n".encode()), (0, b"end")]


def test_a_long_line_comes_in_pieces(pipes):
    got, ((first, into_first), (second, into_second)) = [], pipes
    os.write(into_first, b"one\n" + b"x" * 9 + b"\n" + b"y" * 4)
    os.close(into_first)
    os.write(into_second, b"z" * 9)
    thread = threading.Thread(
        target=read_lines,
        args=([first, second], lambda number, text: got.append((number, text))),
        kwargs={"most": 4},
        daemon=True,
    )
    thread.start()
    while (1, b"z" * 8) not in got:
        assert thread.is_alive()
    os.close(into_second)
    thread.join()
    assert [text for number, text in got if number == 0] == [b"one\nxxxxxxxxx\n", b"yyyy"]
    assert [text for number, text in got if number == 1] == [b"z" * 8, b"z"]

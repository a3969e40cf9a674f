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
    assert got == [(0, "one\n"), (1, "other\n"), (0, "two\n"), (0, "thr\ufffd")]
    for pipe in (first, second):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(pipe)

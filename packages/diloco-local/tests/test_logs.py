import json
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_local._logs import _BLOCK, check_streams, iterate, tail, tail_lines
from diloco_local._rundir import ReplicaDir

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n"), max_size=8)


def attempt_of(tmp_path, number=1, out="", err="", times=()):
    replica = ReplicaDir(tmp_path)
    files = replica.attempt(number)
    files.path.mkdir(parents=True)
    files.log("stdout").write_text(out, newline="")
    files.log("stderr").write_text(err, newline="")
    files.times.write_text("".join(json.dumps(sample) + "\n" for sample in times))
    return replica


def lines_of(replica, **options):
    return list(iterate(replica, lambda: True, **options))


@given(st.lists(TEXT, max_size=12), TEXT, st.integers(0, 15))
def test_the_tail_of_a_file(tmp_path_factory, lines, rest, n):
    path = tmp_path_factory.mktemp("t") / "log"
    data = "".join(line + "\n" for line in lines) + rest
    path.write_text(data, newline="")
    expected = [*lines, *([rest] if rest else [])]
    found = tail_lines(path, n)
    assert [line.text for line in found] == (expected[-n:] if n else [])
    if found:
        assert found[-1].end == len(data.encode())


def test_the_tail_reads_over_blocks(tmp_path):
    path = tmp_path / "log"
    lines = [f"{k} " + "x" * 1000 for k in range(300)]
    path.write_text("\n".join(lines))
    assert path.stat().st_size > 3 * _BLOCK
    assert [line.text for line in tail_lines(path, 150)] == lines[-150:]
    assert tail_lines(tmp_path / "none", 3) == []


def test_nothing_is_nothing(tmp_path):
    replica = ReplicaDir(tmp_path / "none")
    assert tail(replica, 10) == []
    assert lines_of(replica) == []


def test_streams(tmp_path):
    replica = attempt_of(tmp_path, out="o1\no2\n", err="e1\n", times=[[10.0, 3, 3], [20.0, 6, 3]])
    assert lines_of(replica, streams="stdout") == ["o1", "o2"]
    assert lines_of(replica, streams="stderr") == ["e1"]
    assert lines_of(replica) == ["o1", "e1", "o2"]
    assert tail(replica, 2) == ["e1", "o2"]
    assert tail(replica, 2, "stdout") == ["o1", "o2"]
    with pytest.raises(ValueError, match="combined, stderr, stdout"):
        check_streams("syslog")
    with pytest.raises(ValueError, match="syslog"):
        iterate(replica, lambda: True, streams="syslog")  # at once, not at the first line


def test_since_until_regex(tmp_path):
    replica = attempt_of(
        tmp_path, out="a\nb\nc\n", times=[[10.0, 2, 0], [20.0, 4, 0], [30.0, 6, 0]]
    )
    assert lines_of(replica, since=20.0) == ["b", "c"]
    assert lines_of(replica, until=20.0) == ["a"]
    assert lines_of(replica, since=11.0, until=29.0) == ["b"]
    assert lines_of(replica, since=10.0, until=20.0001) == ["a", "b"]
    assert lines_of(replica, regex="[ac]") == ["a", "c"]


def test_all_attempts_in_order(tmp_path):
    replica = attempt_of(tmp_path, 1, out="first\n")
    attempt_of(tmp_path, 2, out="second\n")
    attempt_of(tmp_path, 10, out="tenth\n")
    assert lines_of(replica) == ["first", "second", "tenth"]
    assert tail(replica, 2) == ["second", "tenth"]


def test_whitespace_and_carriage_returns_are_kept(tmp_path):
    replica = attempt_of(tmp_path, out="  a \t\r\n50%\r100%\nb\x0bc\n\n")
    assert lines_of(replica) == ["  a \t\r", "50%\r100%", "b\x0bc", ""]
    assert tail(replica, 9) == ["  a \t\r", "50%\r100%", "b\x0bc", ""]


def test_bytes_that_are_no_text(tmp_path):
    replica = attempt_of(tmp_path)
    replica.attempt(1).log("stdout").write_bytes(b"a\xffb\n")
    assert lines_of(replica) == ["a\ufffdb"]


def test_follow_reads_what_comes_and_ends(tmp_path):
    replica = attempt_of(tmp_path, out="one\ntw")
    steps = iter(["o\nthree\n", "", "four\nlast without end"])
    ended = []

    def sleep(_seconds):
        with replica.attempt(1).log("stdout").open("a") as stream:
            try:
                stream.write(next(steps))
            except StopIteration:
                ended.append(True)

    found = list(iterate(replica, lambda: bool(ended), follow=True, sleep=sleep))
    assert found == ["one", "two", "three", "four", "last without end"]


def test_follow_goes_on_with_the_next_attempt(tmp_path):
    replica = attempt_of(tmp_path, 1, out="a\nunfinished")
    states = iter([False, False, False, True])
    started = []

    def sleep(_seconds):
        if not started:
            attempt_of(tmp_path, 2, out="b\n")
            started.append(True)

    assert list(iterate(replica, lambda: next(states, True), follow=True, sleep=sleep)) == [
        "a",
        "unfinished",
        "b",
    ]


def test_follow_ends_after_until(tmp_path):
    replica = attempt_of(tmp_path, out="a\n", times=[[10.0, 2, 0]])
    now = [9.0]

    def sleep(seconds):
        now[0] += 1.0

    found = list(
        iterate(replica, lambda: False, follow=True, until=15.0, sleep=sleep, clock=lambda: now[0])
    )
    assert found == ["a"]
    assert now[0] < 20


def test_a_long_log_is_read_in_pieces(tmp_path):
    lines = [f"{k:07d}" + "x" * 93 for k in range(100_000)]
    replica = attempt_of(tmp_path, out="\n".join(lines))  # 10 MB, no line end at the end
    assert lines_of(replica, streams="stdout") == lines


@pytest.mark.processes
def test_a_fast_writer_does_not_hold_the_reader(tmp_path):
    replica = attempt_of(tmp_path, out="x\n" * 1000)
    stop = threading.Event()

    def write():
        with replica.attempt(1).log("stdout").open("a") as stream:
            while not stop.is_set():
                stream.write("y\n" * 10_000)
                time.sleep(0)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        assert len(lines_of(replica)) >= 1000
    finally:
        stop.set()
        thread.join()

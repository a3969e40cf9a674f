import json
import time
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_local import _logs
from diloco_local._logs import _BLOCK, tail, tail_lines
from diloco_local._rundir import ReplicaDir
from diloco_protocol import LogQuery
from diloco_protocol.backend import LINE_BYTES

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n"), max_size=8)


def attempt_of(tmp_path, number=1, out="", err="", times=()):
    replica = ReplicaDir(tmp_path)
    files = replica.attempt(number)
    files.path.mkdir(parents=True)
    files.log("stdout").write_text(out, newline="")
    files.log("stderr").write_text(err, newline="")
    files.times.write_text("".join(json.dumps(sample) + "\n" for sample in times))
    return replica


def iterate(replica, terminal, *, sleep=time.sleep, clock=time.time, **selection):
    return _logs.iterate(replica, terminal, LogQuery(**selection), sleep=sleep, clock=clock)


def lines_of(replica, **options):
    return list(iterate(replica, lambda: True, **options))


@given(st.lists(TEXT, max_size=12), TEXT, st.integers(0, 15), st.sampled_from([1, 2, 7, _BLOCK]))
def test_the_tail_of_a_file(tmp_path_factory, lines, rest, n, block):
    path = tmp_path_factory.mktemp("t") / "log"
    data = "".join(line + "\n" for line in lines) + rest
    path.write_text(data, newline="")
    expected = [*lines, *([rest] if rest else [])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_logs, "_BLOCK", block)
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


def test_follow_reads_a_log_that_is_truncated_from_its_beginning(tmp_path):
    begin = "before\nhalf a li"
    replica = attempt_of(tmp_path, out=begin, times=[(1, len(begin), 0)])
    log, ended = replica.attempt(1).log("stdout"), []

    def sleep(_):
        if log.read_text() == begin:
            log.write_text("after\n")
        elif log.stat().st_size == 6:
            with log.open("a") as stream:
                stream.write("more\n")
        else:
            ended.append(True)

    found = list(iterate(replica, lambda: bool(ended), follow=True, since=0.5, sleep=sleep))
    assert found == ["before", "half a li", "after", "more"]


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


def read_all(replica):
    return lines_of(replica, streams="stdout")


def read_followed(replica):
    return lines_of(replica, streams="stdout", follow=True)


def read_tail(replica):
    return tail(replica, 100)


@pytest.mark.sampled
@pytest.mark.parametrize("read", [read_all, read_followed, read_tail])
def test_a_line_without_end_takes_bounded_memory(tmp_path, read, monkeypatch):
    """Each of its 256 MiB is looked at once, or a quarter twice for a tail; one or so is held."""
    replica = attempt_of(tmp_path)
    size = 1 << 28
    with replica.attempt(1).log("stdout").open("wb") as log:
        log.write(b"before\n")
        log.truncate(size)  # takes no room on the disk
        log.seek(size)
        log.write(b"\nafter")
    seen = []

    def counted(path, mode, opened=_logs.open_own_stream):
        return Counted(opened(path, mode), seen)

    monkeypatch.setattr(_logs, "open_own_stream", counted)
    tracemalloc.start()
    try:
        *before, line, after = read(replica)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # A tail looks 64 MiB back for the beginning of a line.
    assert (before, after) == ([] if read is read_tail else ["before"], "after")
    assert line.startswith("\0" * LINE_BYTES + " [... ")
    assert len(line) < LINE_BYTES + 100
    assert peak < 16 * LINE_BYTES
    assert sum(seen) <= (size // 2 if read is read_tail else size) + (1 << 18)


class Counted:
    """A stream that counts the bytes read from it."""

    def __init__(self, stream, seen):
        self._stream = stream
        self._seen = seen

    def read(self, size):
        data = self._stream.read(size)
        self._seen.append(len(data))
        return data

    def seek(self, *where):
        return self._stream.seek(*where)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._stream.close()


def test_a_cut_line_has_the_time_of_its_end(tmp_path):
    replica = attempt_of(tmp_path)
    long = LINE_BYTES + 1000
    replica.attempt(1).log("stdout").write_bytes(b"x" * long + b"\nb\n")
    replica.attempt(1).log("stderr").write_bytes(b"between\n")
    times = [[10.0, long - 1, 0], [20.0, long - 1, 8], [30.0, long + 1, 8], [40.0, long + 3, 8]]
    replica.attempt(1).times.write_text("".join(json.dumps(each) + "\n" for each in times))
    for lines in (lines_of(replica), tail(replica, 3), tail(replica, 4)):
        assert [line[:7] for line in lines] == ["between", "xxxxxxx", "b"]
    assert lines_of(replica, since=35.0) == ["b"]


def test_samples_are_read_to_the_end(tmp_path):
    """A run of days has megabytes of them."""
    out = "x\n" * 20_000
    samples = "".join(f"[{number}.0, {2 * number}, 0]{' ' * 20}\n" for number in range(19_000))
    assert len(samples) > 1 << 19
    replica = attempt_of(tmp_path, out=out, err="b\n")
    samples += f"[100000.0, {len(out)}, 0]\n[100001.0, {len(out)}, 2]\n"
    replica.attempt(1).times.write_text(samples)
    assert tail(replica, 1) == ["b"]
    assert lines_of(replica, since=100000.5) == ["b"]


def test_a_last_line_without_end_is_read_wherever_the_pieces_end(tmp_path):
    replica = attempt_of(tmp_path, out="a\n" + "b" * 98)
    reader = _logs._Reader(replica.attempt(1).log("stdout"))
    assert [line.text for line in reader.read(last=True, limit=100)] == ["a"]
    assert not reader.ended  # it has not seen the end yet
    assert [line.text for line in reader.read(last=True, limit=100)] == ["b" * 98]
    assert reader.ended


def test_a_log_of_one_piece_is_read_to_its_end(tmp_path):
    piece = 1 << 22
    assert lines_of(attempt_of(tmp_path, out="a\n" + "b" * (piece - 2)))[1].startswith("bbb")


def test_a_tail_is_of_the_lines_that_were_there(tmp_path, monkeypatch):
    replica = attempt_of(tmp_path, out="a\nb\nc\n")
    log = replica.attempt(1).log("stdout")

    def and_more_is_written(*given, found=_logs._begin_of_last):
        with log.open("a") as stream:
            stream.write("d\ne\n")
        return found(*given)

    monkeypatch.setattr(_logs, "_begin_of_last", and_more_is_written)
    assert [line.text for line in tail_lines(log, 2)] == ["b", "c"]


def test_what_is_no_sample_is_passed_over(tmp_path):
    replica = attempt_of(tmp_path, out="a\nb\n")
    damage = ["", "{", "null", "5", "[]", "[1,2]", '["x", 2, 0]', '{"a": 1}', "[[], 2, 0]"]
    damage += ["[1, 1e999, 0]", "[" * 100_000, "[1, 2, null]", "[" + "1" * 5000 + ", 2, 0]"]
    good = ["[10.0, 2, 0]", "[20.0, 4, 0]"]
    replica.attempt(1).times.write_bytes(
        "\n".join([*damage, good[0], *damage, good[1]]).encode() + b"\n\xff\n"
    )
    assert tail(replica, 1) == ["b"]
    assert lines_of(replica, since=15.0) == ["b"]


@pytest.mark.parametrize("follow", [False, True])
def test_a_fast_writer_does_not_hold_the_reader(tmp_path, monkeypatch, follow):
    """It writes more whenever something is read."""
    replica = attempt_of(tmp_path, out="x\n" * 140_000 + "begun")
    log = replica.attempt(1).log("stdout")
    writes = iter(range(10))

    def and_more_is_written(path, mode, opened=_logs.open_own_stream):
        if path == log and next(writes, None) is not None:
            with log.open("a") as stream:
                stream.write("y\n" * 140_000)
        return opened(path, mode)

    monkeypatch.setattr(_logs, "open_own_stream", and_more_is_written)
    assert lines_of(replica, follow=follow) == ["x"] * 140_000 + ["begun"]


def test_a_log_is_read_in_pieces_that_hold_few_lines(tmp_path, monkeypatch):
    """A line takes a hundred times the memory of a newline."""
    seen = []

    def counted(path, mode, opened=_logs.open_own_stream):
        return Counted(opened(path, mode), seen)

    monkeypatch.setattr(_logs, "open_own_stream", counted)
    assert read_all(attempt_of(tmp_path, out="\n" * 300_000)) == [""] * 300_000
    assert max(seen) <= 1 << 18


def test_any_number_of_samples_takes_bounded_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(_logs, "_MOST_SAMPLES", 1000)
    replica = attempt_of(tmp_path, out="a\n")
    replica.attempt(1).times.write_text("[1,2,0]\n" * (1 << 18))
    clock = _logs._Clock(replica.attempt(1))
    clock.refresh()
    assert 1000 <= len(clock.times) < 1000 + (1 << 18) // len("[1,2,0]\n") + 1
    assert tail(replica, 1) == ["a"]
    replica.attempt(1).times.write_text(f"[1,{1 << 63},0]\n[2,2,0]\n")
    assert lines_of(replica, since=2.0) == ["a"]


@pytest.mark.sampled
@pytest.mark.parametrize("sample", ["[1,1,1]\n", "[{0},{0},{0}]\n", "[1,1,1]"])
@pytest.mark.parametrize("read", [read_all, read_followed, read_tail])
def test_of_samples_no_more_are_read_than_a_log_can_have(tmp_path, read, sample, monkeypatch):
    """A replica can write there, and a short log is to be read at once."""
    replica = attempt_of(tmp_path, out="a\n" * 100)
    samples = "".join(sample.format(number) for number in range(200_000))
    replica.attempt(1).times.write_text(samples)
    seen = []

    def counted(path, mode, opened=_logs.open_own_stream):
        stream = opened(path, mode)
        return Counted(stream, seen) if path == replica.attempt(1).times else stream

    monkeypatch.setattr(_logs, "open_own_stream", counted)
    assert read(replica)[-1] == "a"
    assert 0 < sum(seen) <= 1 << 18 < len(samples)


def test_the_streams_of_a_long_log_are_merged(tmp_path):
    out = "".join(f"{k:07d}\n" for k in range(1 << 17))  # 1 MiB, which is several pieces
    times = [[10.0, len(out) - 8, 0], [20.0, len(out) - 8, 5], [30.0, len(out), 5]]
    lines = lines_of(attempt_of(tmp_path, out=out, err="late\n", times=times))
    assert lines[-2:] == ["late", f"{(1 << 17) - 1:07d}"]


def test_what_was_written_later_comes_later_also_if_the_clock_was_set_back(tmp_path):
    times = [[4e9, 3, 0], [4e9 + 1, 3, 3], [4e9 - 3600, 6, 3], [4e9 - 3599, 6, 6]]
    replica = attempt_of(tmp_path, out="o1\no2\no3\n", err="e1\ne2\n", times=times)
    assert lines_of(replica) == ["o1", "e1", "o2", "e2", "o3"]
    assert lines_of(replica, since=4e9 + 1) == ["e1", "o2", "e2", "o3"]
    for number in range(1, 6):
        assert tail(replica, number) == ["o1", "e1", "o2", "e2", "o3"][-number:]


@pytest.mark.parametrize("second", [[], [[4e9 - 3600, 3, 0]]])
def test_a_clock_that_is_set_back_between_two_attempts_hides_no_line(tmp_path, second):
    attempt_of(tmp_path, 1, out="o1\no2\n", times=[[4e9, 3, 0], [4e9 + 1, 6, 0]])
    replica = attempt_of(tmp_path, 2, out="o3\n", times=second)
    assert lines_of(replica, since=4e9 + 1) == ["o2", "o3"]
    assert lines_of(replica, until=4e9 + 1) == ["o1"]

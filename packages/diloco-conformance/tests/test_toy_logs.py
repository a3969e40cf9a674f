"""The toy's reader of logs: whatever pieces the bytes come in, the lines are the same."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from toy_cloud import Chunk
from toy_logs import LineReader, chosen, of_stream

from diloco_protocol import LogQuery

STREAMS = ("stdout", "stderr")


def read(chunks):
    reader = LineReader()
    return [*reader.feed(chunks), *reader.finish()]


def lines_of(data):
    return [line.decode(errors="replace") for line in data.removesuffix(b"\n").split(b"\n")]


@settings(max_examples=100, derandomize=True, database=None)
@given(data=st.binary(min_size=1, max_size=60), cuts=st.sets(st.integers(0, 60)))
def test_the_borders_of_chunks_mean_nothing(data, cuts):
    borders = [0, *sorted(cut for cut in cuts if cut < len(data)), len(data)]
    pieces = [data[start:end] for start, end in pairwise(borders)]
    lines = read([Chunk(float(n), 1, "stdout", piece) for n, piece in enumerate(pieces)])
    assert [line for _, line in lines] == lines_of(data)
    assert [time for time, _ in lines] == sorted(time for time, _ in lines)


@settings(max_examples=100, derandomize=True, database=None)
@given(st.lists(st.tuples(st.integers(1, 3), st.sampled_from(STREAMS), st.binary(max_size=8))))
def test_streams_and_attempts_are_kept_apart(written):
    written.sort(key=lambda one: one[0])
    chunks = [Chunk(float(n), *one) for n, one in enumerate(written)]
    for stream in STREAMS:
        of_attempts = (
            b"".join(one.data for one in chunks if (one.attempt, one.stream) == (attempt, stream))
            for attempt in (1, 2, 3)
        )
        expected = [line for data in of_attempts if data for line in lines_of(data)]
        assert [line for _, line in read(of_stream(chunks, stream))] == expected


def test_a_line_has_the_time_of_its_end():
    chunks = [Chunk(1.0, 1, "stdout", b"a\nb"), Chunk(2.0, 1, "stdout", b"c\nd")]
    assert read(chunks) == [(1.0, "a"), (2.0, "bc"), (2.0, "d")]


def test_bounds():
    lines = [(1.0, "one"), (2.0, "two"), (3.0, "three")]
    assert list(chosen(lines, LogQuery(since=2.0))) == ["two", "three"]
    assert list(chosen(lines, LogQuery(until=2.0))) == ["one"]
    assert list(chosen(lines, LogQuery(regex="e$"))) == ["one", "three"]

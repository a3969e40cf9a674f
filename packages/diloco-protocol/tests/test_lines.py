"""The bytes of a log as lines, in bounded memory."""

import itertools
import tracemalloc

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from diloco_protocol import _follow as _lines
from diloco_protocol._follow import CUT
from diloco_protocol.backend import LINE_BYTES, LineSplitter, split_lines

LONGEST = 8


def pieces(data, cuts):
    places = sorted({0, len(data), *(min(cut, len(data)) for cut in cuts)})
    return [data[start:end] for start, end in itertools.pairwise(places)]


TEXTS = st.lists(st.binary(max_size=3 * LONGEST).map(lambda line: line.replace(b"\n", b" ")))


@given(lines=TEXTS, cuts=st.lists(st.integers(0, 90)), finished=st.booleans())
@example(lines=[b"x" * LONGEST, b"y" * (LONGEST + 1)], cuts=[LONGEST], finished=True)
def test_lines_however_they_arrive(lines, cuts, finished):
    data = b"\n".join(lines) + (b"\n" if finished and lines else b"")
    expected = [
        line if len(line) <= LONGEST else line[:LONGEST] + CUT for line in data.split(b"\n")
    ]
    if expected[-1] == b"":
        expected.pop()  # what follows the last newline is no line
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_lines, "LINE_BYTES", LONGEST)
        assert list(split_lines(pieces(data, cuts))) == expected


@given(lines=TEXTS, cuts=st.lists(st.integers(0, 90)), finished=st.booleans())
def test_where_each_line_ends(lines, cuts, finished):
    data = b"\n".join(lines) + (b"\n" if finished and lines else b"")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_lines, "LINE_BYTES", LONGEST)
        splitter, ends = LineSplitter(), []
        for piece in pieces(data, cuts):
            ends += [splitter.position for _ in splitter.feed(piece)]
        if splitter.rest() is not None:
            ends.append(splitter.position)
    # The end of a line is the place behind its newline, or the end of everything.
    expected = [place + 1 for place, byte in enumerate(data) if byte == ord("\n")]
    assert ends == expected + [len(data)] * (data[-1:] not in {b"", b"\n"})


def test_a_line_is_begun_in_one_piece_and_ended_in_another():
    splitter = LineSplitter()
    assert list(splitter.feed(b"a\nb")) == [b"a"]
    assert list(splitter.feed(b"c")) == []
    assert splitter.rest() == b"bc"
    assert splitter.rest() is None
    assert list(splitter.feed(b"d\n")) == [b"d"]


def test_a_line_without_end_takes_bounded_memory_and_linear_time():
    """256 MiB of one line: about 1 MiB is held, however it is cut; each byte is looked at once."""
    piece = b"x" * (1 << 16)
    tracemalloc.start()
    try:
        (line,) = split_lines(itertools.repeat(piece, 1 << 12))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert line == b"x" * LINE_BYTES + CUT
    assert peak < 4 * LINE_BYTES

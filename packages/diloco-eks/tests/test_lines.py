"""Bytes of a log as lines, and going on where a connection broke."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from diloco_eks._lines import Line, Place, split_lines

STAMPS = [
    f"2026-11-21T04:30:4{second}{fraction}Z"
    for second in range(4)
    for fraction in ("", ".1", ".123456789", ".5")
]
TEXTS = st.text(st.sampled_from("ab \r\tü"), max_size=6)
LINES = st.lists(st.tuples(st.sampled_from(STAMPS), TEXTS), max_size=12).map(
    lambda pairs: [
        Line(stamp, text) for stamp, text in sorted(pairs, key=lambda pair: STAMPS.index(pair[0]))
    ]
)


@given(LINES, st.lists(st.integers(0, 400), max_size=8), st.booleans())
def test_lines_come_whole_however_the_bytes_are_cut(lines, cuts, finished):
    data = "\n".join(f"{line.stamp} {line.text}" for line in lines).encode() + (
        b"\n" if finished and lines else b""
    )
    places = sorted({0, len(data), *(min(cut, len(data)) for cut in cuts)})
    chunks = [data[start:end] for start, end in itertools.pairwise(places)]
    assert list(split_lines(chunks)) == lines


@given(LINES, st.integers(0, 12), st.integers(0, 12))
def test_a_broken_connection_costs_and_repeats_nothing(lines, first, again):
    """The second connection starts anywhere up to where the first one broke, but at a whole second."""
    place = Place()
    read = list(place.fresh(lines[:first]))
    start = min(again, len(read))
    while 0 < start < len(lines) and lines[start - 1].stamp[:19] == lines[start].stamp[:19]:
        start -= 1
    read += place.fresh(lines[start:])
    assert read == lines


def test_what_has_no_time_is_a_line_too():
    assert list(split_lines([b"no time here\n2026-11-21T04:30:47Z\n\nx"])) == [
        Line("", "no time here"),
        Line("2026-11-21T04:30:47Z", ""),
        Line("", ""),
        Line("", "x"),
    ]


def test_bytes_that_are_no_text_are_shown():
    (line,) = split_lines([b"2026-11-21T04:30:47Z a\xffb"])
    assert line.text == "a\N{REPLACEMENT CHARACTER}b"


def test_a_long_line_takes_linear_time():
    """Every byte is handled a few times, and not once for every chunk that comes after it."""

    class Chunk(bytes):
        def __add__(self, other):
            raise AssertionError("a line is not to be copied for every chunk of it")

        __radd__ = __add__

    (line,) = split_lines([Chunk(b"x" * 100)] * 1000)
    assert line.text == "x" * 100_000

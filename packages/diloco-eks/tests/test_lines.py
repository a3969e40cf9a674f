"""Bytes of a log as lines, and going on where a connection broke."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_eks._errors import MissingError
from diloco_eks._lines import Line, Place, lines_of, written
from diloco_protocol import UnavailableError
from diloco_protocol.backend import LINE_BYTES

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
    assert list(lines_of(chunks)) == lines


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
    assert list(lines_of([b"no time here\n2026-11-21T04:30:47Z\n\nx"])) == [
        Line("", "no time here"),
        Line("2026-11-21T04:30:47Z", ""),
        Line("", ""),
        Line("", "x"),
    ]


def test_bytes_that_are_no_text_are_shown():
    (line,) = lines_of([b"2026-11-21T04:30:47Z a\xffb"])
    assert line.text == "a\N{REPLACEMENT CHARACTER}b"


def test_a_line_without_end_is_cut():
    (line,) = lines_of([b"2026-11-21T04:30:47Z ", *itertools.repeat(b"x" * (1 << 16), 64)])
    assert line.stamp == "2026-11-21T04:30:47Z"
    assert line.text.startswith("x" * (LINE_BYTES - 21) + " [... the line was cut here")


def test_words_of_the_kubelet_are_no_lines():
    kubelet = b"unable to retrieve container logs for containerd://abc"
    stamped = b"2026-11-21T04:30:47Z mine\n"
    assert [line.text for line in written(lines_of([stamped, kubelet]))] == ["mine"]
    assert list(written(lines_of([]))) == []
    with pytest.raises(MissingError, match=r"there is no log: unable to retrieve .*//abc"):
        list(written(lines_of([kubelet])))
    with pytest.raises(UnavailableError, match="not the cluster's own: <html>log in</html>"):
        list(written(lines_of([b"<html>log in</html>"])))

"""Bytes of a log as lines, and going on where a connection broke."""

import contextlib
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_eks._client._errors import MissingError, NoLogError
from diloco_eks._verbs._lines import Line, Place, lines_of, written
from diloco_protocol import UnavailableError
from diloco_protocol.backend import LINE_BYTES

STAMPS = [
    f"2026-11-21T04:30:4{second}{fraction}Z"
    for second in range(4)
    for fraction in ("", ".1", ".123456789", ".5")
]
TEXTS = st.text(st.sampled_from("ab \r\tü"), max_size=6)
LINES = st.lists(st.builds(Line, st.sampled_from(STAMPS), TEXTS), max_size=12)
BREAKS = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=4)


@given(LINES, st.lists(st.integers(0, 400), max_size=8), st.booleans())
def test_lines_come_whole_however_the_bytes_are_cut(lines, cuts, finished):
    data = "\n".join(f"{line.stamp} {line.text}" for line in lines).encode() + (
        b"\n" if finished and lines else b""
    )
    places = sorted({0, len(data), *(min(cut, len(data)) for cut in cuts)})
    chunks = [data[start:end] for start, end in itertools.pairwise(places)]
    assert list(lines_of(chunks)) == lines


def read_on(place, log, ends_after=None):
    """An answer with the last lines or all, as the place asks for; it may break off."""
    asked_for = log if place.tail is None else log[-place.tail :]

    def answer():
        for number, line in enumerate(asked_for):
            if number == ends_after:
                raise UnavailableError("broken off")
            yield line

    read = []
    with contextlib.suppress(UnavailableError):
        for line in place.fresh(answer()):
            read.append(line)  # noqa: PERF402 - what came before it broke off counts
    return read


@given(LINES, BREAKS, st.booleans())
def test_a_broken_connection_costs_and_repeats_nothing(lines, breaks, few_are_known):
    """Whatever the stamps say: two streams, summer time and a clock that is set back mix them."""
    if few_are_known:
        lines = [Line(line.stamp, f"{number} {line.text}") for number, line in enumerate(lines)]
    place, read = Place(2 if few_are_known else 100), []
    for written_by_then, ends_after in breaks:
        read += read_on(place, lines[: max(written_by_then, len(read))], ends_after)
    for _ in range(2):
        read += read_on(place, lines)
    assert read == lines
    assert not place.lost


def test_a_new_file_of_the_node_goes_on_behind_what_is_known():
    lines = [Line(STAMPS[0], f"line {number}") for number in range(9)]
    place = Place(3)
    assert read_on(place, lines[:6]) == lines[:6]
    assert read_on(place, lines[4:7]) == lines[6:7]
    assert read_on(place, lines[6:8]) == []
    assert place.lost  # what may begin within a line shows nothing
    assert read_on(place, lines[6:8]) == lines[7:8]
    assert read_on(place, lines[6:8]) == []
    assert read_on(place, lines[8:]) == lines[8:]


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

    def read(*pieces, is_gone=False):
        return [line.text for line in written(lines_of(pieces), lambda: is_gone)]

    assert read(stamped, kubelet, is_gone=True) == ["mine"]
    assert read(is_gone=True) == []
    with pytest.raises(MissingError, match=r"there is no log: unable to retrieve .*//abc"):
        read(kubelet, is_gone=True)
    with pytest.raises(NoLogError, match=r"cannot read the log now: unable to retrieve .*//abc"):
        read(kubelet)
    with pytest.raises(UnavailableError, match="cannot read the log now: rpc error") as caught:
        read(b"rpc error: code = Unavailable desc = connection refused")
    assert not isinstance(caught.value, NoLogError)
    with pytest.raises(UnavailableError, match="not the cluster's own: <html>log in</html>"):
        read(b"<html>log in</html>", is_gone=True)

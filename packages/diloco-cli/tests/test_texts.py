"""Texts that are safe to print, and texts that people type."""

import doctest
from datetime import datetime

import pytest

from diloco_cli import _facts, _texts
from diloco_cli._texts import clean, in_ranges, read_moment, read_ranks
from diloco_protocol import InvalidRequestError


@pytest.mark.parametrize("module", [_texts, _facts])
def test_the_examples(module):
    assert doctest.testmod(module) == (0, doctest.testmod(module).attempted)
    assert doctest.testmod(module).attempted


@pytest.mark.parametrize("character", ["\x1b", "\x00", "\r", "\x9b", "\u202e", "\u2028", "\ud800"])
def test_no_terminal_obeys_what_is_printed(character):
    text = clean(f"a{character}b")
    assert character not in text
    assert text.startswith("a\\")
    assert text.endswith("b")


def test_what_is_printed_is_bounded():
    assert len(clean("x" * 10_000_000)) < 1100


@pytest.mark.parametrize(
    ("text", "moment"),
    [("90s", 910.0), ("10m", 400.0), ("1.5m", 910.0), ("2h", -6200.0), ("1d", -85_400.0)],
)
def test_a_moment_is_a_duration_before_now(text, moment):
    assert read_moment(text, 1000.0) == moment


def test_a_moment_is_a_date():
    assert read_moment("1970-01-02T00:00Z", 0.0) == 86_400.0
    assert read_moment("2026-03-14", 0.0) == datetime(2026, 3, 14).timestamp()  # noqa: DTZ001


@pytest.mark.parametrize(
    "text", ["", "10", "-5m", "yesterday", "5 m", "1e3s", "٣s", "9" * 400 + "s"]
)
def test_any_other_moment_is_refused(text):
    with pytest.raises(InvalidRequestError, match="is not a time: give how long ago, such as 90s"):
        read_moment(text, 0.0)


@pytest.mark.parametrize(
    ("texts", "ranks"),
    [((), [0, 1, 2, 5]), (("1",), [1]), (("0-2",), [0, 1, 2]), (("5,0", "1"), [0, 1, 5])],
)
def test_ranks(texts, ranks):
    assert read_ranks(texts, [5, 2, 1, 0]) == ranks


@pytest.mark.parametrize("text", ["", "a", "2-1", "1-", "-1", "1,,2", "0-99999999999"])
def test_what_is_no_rank(text):
    with pytest.raises(InvalidRequestError, match="is not a rank: give numbers and ranges"):
        read_ranks([text], [0, 1, 2])


@pytest.mark.parametrize("text", ["3", "2-5", "0-999999999"])
def test_ranks_that_are_not_there(text):
    with pytest.raises(InvalidRequestError, match="the run has the ranks 0-2, 5 here"):
        read_ranks([text], [0, 1, 2, 5])


def test_ranges_of_many():
    assert in_ranges(range(1000)) == "0-999"
    assert in_ranges([]) == ""

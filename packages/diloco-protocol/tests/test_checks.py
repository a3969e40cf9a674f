"""What a caller gives is returned, or named with what is allowed."""

import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_protocol import Backoff, FolderJournal, InvalidRequestError, _checks
from diloco_protocol.backend import (
    check_amount,
    check_backoff,
    check_callable,
    check_journal,
    check_names,
    check_path,
    check_paths,
    check_restarts,
    check_seconds,
    check_text,
    check_texts,
    check_variables,
    check_whole,
    read_whole,
    shown,
)

NOT_A_NUMBER = [True, "1", [1], math.nan, math.inf, -math.inf]


def refused(message):
    return pytest.raises(InvalidRequestError, match=f"^{re.escape(message)}$")


@given(st.integers(-3, 8))
def test_whole_numbers_have_limits(number):
    if 0 <= number <= 5:
        assert check_whole("size", number, 0, 5) == number
    else:
        with refused(f"size must be a whole number from 0 to 5, not {number}"):
            check_whole("size", number, 0, 5)


@pytest.mark.parametrize("value", [*NOT_A_NUMBER, 2.0, None, -1])
def test_what_is_not_a_whole_number(value):
    with refused(f"size must be a whole number from 0, not {value!r}"):
        check_whole("size", value, 0)


def test_a_secret_in_the_place_of_a_number_is_not_shown():
    with pytest.raises(InvalidRequestError) as caught:
        read_whole("rank", f"postgres://admin:{'hunter2' * 6}@db/x", 0, 9)
    assert "hunter2" not in str(caught.value)


def test_a_whole_number_or_none():
    assert check_whole("size", None, 0, none=True) is None
    assert check_whole("size", 10**30, 0, none=True) == 10**30
    with refused("size must be a whole number from 0 or None, not -1"):
        check_whole("size", -1, 0, none=True)


def test_seconds_become_a_float():
    assert repr(check_seconds("pause", 3)) == "3.0"
    assert check_seconds("pause", 0) == 0.0


@pytest.mark.parametrize("value", [*NOT_A_NUMBER, None, -0.1])
def test_what_is_not_a_number_of_seconds(value):
    with refused(f"pause must be a number of seconds from 0, not {value!r}"):
        check_seconds("pause", value)


def test_zero_seconds_where_time_must_pass():
    with refused("pause must be a positive number of seconds, not 0"):
        check_seconds("pause", 0, positive=True)


def test_text_is_more_than_blanks():
    assert check_text("name", " a ") == " a "
    for value in ("", " \n", 1, None):
        with refused(f"name must be non-empty text, not {value!r}"):
            check_text("name", value)


@pytest.mark.parametrize("given", ["a\ud800", "\udcff"])
def test_text_can_be_sent(given):
    with refused("name contains half of a surrogate pair, which cannot be sent as text"):
        check_text("name", given)


def test_amounts_are_text_in_the_end():
    assert [check_amount("cpu", value) for value in (2, 0.5, "500m", None)] == [
        "2", "0.5", "500m", None,
    ]  # fmt: skip
    for value in (0, -1, True, math.inf, [1]):
        with refused(f"cpu must be a positive number, text or None, not {value!r}"):
            check_amount("cpu", value)


def test_texts_are_sorted_copies():
    given_texts = {"b": "1", "a": "2"}
    checked = check_texts("labels", given_texts)
    assert list(checked.items()) == [("a", "2"), ("b", "1")]
    assert check_texts("labels", None) == {}
    with refused("labels must be a mapping of text to text, not a value of type str"):
        check_texts("labels", "a=1")


@pytest.mark.parametrize("check", [check_texts, check_variables])
@pytest.mark.parametrize("given", [{"DB_PASSWORD": "hunter2\ud800"}, {"a\udcff": "hunter2"}])
def test_half_a_surrogate_pair_is_refused_and_not_shown(check, given):
    with pytest.raises(
        InvalidRequestError, match=r"env\['.*'\] contains half of a surrogate"
    ) as caught:
        check("env", given)
    assert "hunter2" not in str(caught.value)


def test_a_long_name_is_not_repeated():
    with pytest.raises(InvalidRequestError, match="may not set") as caught:
        check_variables("env", {"DILOCO_SPEC_" + "1" * 1_000_000: "x"})
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("path", ["/a\0b", "/a\ud800", Path("/a\0")])
def test_a_path_that_no_file_can_have_is_refused(path):
    with pytest.raises(InvalidRequestError, match=r"must be a path, not .*/a"):
        check_path("root", path)
    assert check_path("root", "/a\udcff") == "/a\udcff", "a byte that is no UTF-8"


@pytest.mark.parametrize("check", [check_texts, check_variables])
def test_a_value_that_may_be_a_secret_is_not_in_the_error(check):
    with pytest.raises(
        InvalidRequestError, match="'TOKEN' maps to a value of type bytes"
    ) as caught:
        check("env", {"TOKEN": b"hunter2"})
    assert "hunter2" not in str(caught.value)
    with pytest.raises(InvalidRequestError, match="NUL") as caught:
        check_variables("env", {"TOKEN": "hunter2\0"})
    assert "hunter2" not in str(caught.value)
    with pytest.raises(InvalidRequestError, match="not a value of type list") as caught:
        check("env", ["TOKEN=hunter2"])
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("name", ["1A", "A-B", "", "REPLICA_WORLD_SIZE", "DILOCO_SPEC_7"])
def test_names_that_no_variable_of_a_caller_may_have(name):
    with pytest.raises(InvalidRequestError, match=re.escape(name or "''")):
        check_variables("env", {name: "x"})


@pytest.mark.parametrize("value", ["x" * 131_069, "é" * 65_534 + "x"])
def test_a_variable_that_no_program_can_be_started_with_is_refused(value):
    """Linux counts the bytes of name, = and value, and a NUL behind them."""
    assert check_variables("env", {"A": value}) == {"A": value}
    with refused(
        "env['A'] has 131072 bytes with its name, and Linux takes 131071 without a NUL character: "
        "pass it in a file, or as "
        "an argument of the entrypoint"
    ):
        check_variables("env", {"A": value + "y"})


def test_restarts_have_a_limit():
    assert check_restarts("max_restarts", 1000) == 1000
    with refused("max_restarts must be a whole number from 0 to 1000, not 1001"):
        check_restarts("max_restarts", 1001)


class PathInBytes:
    """Such as the entries of ``os.scandir(b"/a")``."""

    def __fspath__(self):
        return b"/a"

    def __repr__(self):
        return "<path in bytes>"


def test_paths():
    for path in ["/a", "a", Path("/a")]:
        assert check_path("root", path) is path
    with refused("root must be a path, not b'/a'"):
        check_path("root", b"/a")
    with refused("root must be a path, not <path in bytes>"):
        check_path("root", PathInBytes())
    with refused("root must be a path, not ''"):
        check_path("root", "")
    assert check_paths("path", iter(["/a", Path("/b")])) == ("/a", Path("/b"))
    with refused("path must be a list of paths, not a single one: write ['/a']"):
        check_paths("path", "/a")


def test_names_are_a_list():
    assert check_names("gpus", iter("01")) == ("0", "1")
    with refused("gpus must be a list of text, not a single one: write ['0']"):
        check_names("gpus", "0")
    with refused("gpus[1] must be non-empty text, not 1"):
        check_names("gpus", ["0", 1])
    for values in [5, b"01", {"0": "1"}, None]:
        with refused(f"gpus must be a list of text, not {values!r}"):
            check_names("gpus", values)


def test_functions_journals_and_backoffs(tmp_path):
    assert check_callable("clock", math.floor) is math.floor
    with refused("clock must be a function, not 5"):
        check_callable("clock", 5)
    backoff, journal = Backoff(), FolderJournal(tmp_path)
    assert check_backoff("backoff", backoff) is backoff
    assert check_journal("journal", journal) is journal
    assert check_backoff("backoff", None) is check_journal("journal", None) is None
    with refused("backoff must be a Backoff or None, not 5"):
        check_backoff("backoff", 5)
    methods = "record_launch, record_end, runs, handles, end"
    for value in [5, FolderJournal]:
        with refused(
            f"journal must be a RunJournal or None, not {value!r}: a journal has the methods "
            f"{methods}"
        ):
            check_journal("journal", value)


@pytest.mark.parametrize(
    "value",
    [{"DB_PASSWORD": odd} for odd in ("x9", ["x9"], ("x9",), {"x9"}, b"x9", {"a": "x9"}, 98765)]
    + [["--password", odd] for odd in (98765, ["x9"], b"x9")],
)
def test_what_is_below_the_name_of_a_secret_is_not_shown(value):
    told = shown(value)
    assert "x9" not in told
    assert "9876" not in told
    assert "<redacted>" in told
    with pytest.raises(InvalidRequestError) as caught:
        check_text("context", value)
    assert told in str(caught.value)


def test_an_entry_with_the_name_of_a_secret_is_not_shown():
    with pytest.raises(InvalidRequestError, match=r"labels\['DB_PASSWORD'\] .* not <redacted>$"):
        check_text("labels['DB_PASSWORD']", 98765)
    with pytest.raises(InvalidRequestError, match=r"labels\['step'\] .* not 98765$"):
        check_text("labels['step']", 98765)
    with pytest.raises(InvalidRequestError, match=r"not None$"):
        check_text("labels['DB_PASSWORD']", None)


def test_keys_of_any_kind_and_what_contains_itself_have_a_text():
    loop = {1: "x9"}
    loop["password"] = {2: "x9"}
    assert shown(loop) == "{1: 'x9', 'password': <redacted>}"
    loop["loop"] = loop
    assert shown(loop) == "a dict that cannot be shown"


@pytest.mark.parametrize(
    "value",
    [["$" * 1000] * 5000, {"$" * 5_000_000: 1}, {"a": b"$" * 5_000_000}, ([[0] * 1000] * 1000,)],
    ids=["texts", "a key", "bytes", "lists"],
)
def test_of_a_long_value_only_the_beginning_is_looked_at(value, monkeypatch):
    looked_at = []
    monkeypatch.setattr(_checks, "redact_json", lambda given: looked_at.append(given) or given)
    assert shown(value).endswith("…")
    assert len(repr(looked_at)) < 200_000

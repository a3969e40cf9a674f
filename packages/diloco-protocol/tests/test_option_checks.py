"""Checks that are made for one option."""

import pytest

from diloco_protocol import InvalidRequestError
from diloco_protocol.backend import (
    RUNNER,
    check_command,
    check_flag,
    one_of,
    seconds,
    text_like,
    whole,
)

PLACE = text_like(r"s3://\w+", "a place such as 's3://bucket'")
HIDDEN = text_like("a+", "some a", lambda value, name: f"what {name} was")


@pytest.mark.parametrize(
    ("check", "value"),
    [
        (PLACE, "s3://bucket"),
        (one_of("here", "there"), "there"),
        (whole(0, 64), 64),
        (seconds(5.0), 5.0),
        (seconds(5.0), 0.0),
        (check_flag, False),
        (check_command, ("uv", "run")),
    ],
)
def test_what_is_allowed_comes_back(check, value):
    assert check("it", value) == value


@pytest.mark.parametrize(
    ("check", "value", "words"),
    [
        (PLACE, "s3://bucket\n", r"it must be a place such as 's3://bucket', not 's3://bucket\n'"),
        (PLACE, "xs3://bucket", "not 'xs3://bucket'"),
        (PLACE, 5, "not 5"),
        (HIDDEN, "b", "it must be some a, not what it was"),
        (one_of("here", "there"), "h", "it must be one of here, there, not 'h'"),
        (one_of("a.b"), "aXb", "one of a.b"),
        (one_of("here"), None, "not None"),
        (whole(0, 64), 65, "from 0 to 64"),
        (seconds(5.0), 5.5, "to 5"),
        (seconds(positive=True), 0.0, "positive"),
        (check_flag, 1, "it must be True or False, not 1"),
        (check_command, "uv 'run it'", "write ['uv', 'run it']"),
        (check_command, "uv 'run", "write"),
        (check_command, [], "list of words"),
        (check_command, ["uv", "r\0n"], "it[1] contains a NUL character"),
        (check_command, ["u" * 131_072], "or has more than 131071 bytes"),
    ],
)
def test_what_is_not_allowed_is_named(check, value, words):
    with pytest.raises(InvalidRequestError) as caught:
        check("it", value)
    assert words in str(caught.value)


def test_without_a_command_the_runner_is_started():
    assert check_command("command", None) == RUNNER

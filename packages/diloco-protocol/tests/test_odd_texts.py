"""Texts and numbers that are too long or odd have a named error wherever they are given."""

import contextlib
import json

import pytest
from memory_lab import Memory

from diloco_protocol import (
    BackendError,
    InvalidRequestError,
    ReplicaHandle,
    ReplicaSpec,
    SpecVersionError,
    make_request,
    spec_from_arguments,
)
from diloco_protocol.backend import check_seconds, check_text, check_whole

HUGE = 10**5000
NESTED = []
for _ in range(100_000):
    NESTED = [NESTED]


class Unshowable:
    def __repr__(self):
        raise OverflowError("no text of this")


ODD = [
    *(HUGE, -HUGE, [HUGE], {"a": HUGE}, float("nan"), 1e309),
    *("9" * 5000, "\0" * 5000, "\ud800", b"\xff", NESTED, Unshowable()),
]
odd = pytest.mark.parametrize("value", ODD, ids=range(len(ODD)))


@odd
def test_no_check_raises_anything_else(value):
    for check in (
        lambda: check_whole("n", value, 0, 3),
        lambda: check_seconds("n", value, most=9.0),
        lambda: check_text("n", 3 if isinstance(value, str) else value),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            check()
        assert len(str(caught.value)) < 400


@pytest.mark.sampled
@odd
@pytest.mark.parametrize(
    "field", ["rank", "world_size", "metadata", "run_id", "backend_name", "version"]
)
def test_no_field_of_a_handle_raises_anything_else(field, value):
    data = {**ReplicaHandle(0, "memory", run_id="a").to_dict(), field: value}
    try:
        handle = ReplicaHandle.from_dict(data)
    except (InvalidRequestError, SpecVersionError):
        return
    executor = Memory({})
    for verb in (executor.describe, executor.cancel, executor.purge, executor.stream_logs):
        with pytest.raises(BackendError) as caught:
            verb(handle)
        assert len(str(caught.value)) < 1000
        assert str(caught.value).isprintable()


@pytest.mark.parametrize("digits", ["9" * 5000, str(2**31), "-1"])
@pytest.mark.parametrize("field", ["rank", "world_size"])
def test_numbers_in_the_json_of_a_handle(field, digits):
    handle = ReplicaHandle(0, "memory", run_id="a").to_json()
    text = handle.replace(f'"{field}":{json.loads(handle)[field]}', f'"{field}":{digits}')
    with pytest.raises(InvalidRequestError):
        ReplicaHandle.from_json(text)


def test_a_handle_larger_than_any_is_not_parsed():
    with pytest.raises(InvalidRequestError, match="this handle is larger than"):
        ReplicaHandle.from_json("[" * (9 << 20))


@pytest.mark.sampled
@odd
@pytest.mark.parametrize(
    "name",
    ["timeout", "run_id", "run_prefix", "cpu", "memory", "env", "secrets", "labels", "spot", "gpu",
     "max_restarts", "rank_offset", "world_size", "cohort"],
)  # fmt: skip
def test_no_argument_of_a_launch_raises_anything_else(name, value):
    with contextlib.suppress(InvalidRequestError):
        make_request(1, "m:f", None, **{name: value})


@odd
def test_no_entrypoint_and_no_argument_of_it_raises_anything_else(value):
    for given in (
        lambda: make_request(1, value, None),
        lambda: make_request(value, "m:f", None),
        lambda: make_request(1, "m:f", value),
        lambda: make_request(1, "m:f", {"rendezvous_uri": 3, "x": value}),
        lambda: make_request(1, "m:f", {"rank_env": value}),
    ):
        with pytest.raises(InvalidRequestError):
            given()


@pytest.mark.parametrize("place", ["9" * 5000 + "/2", "0/" + "9" * 5000, "²/2", "-1/2", "0", ""])
def test_pieces_of_a_spec(place):
    with pytest.raises(InvalidRequestError):
        spec_from_arguments([f"--spec-piece={place}:x"])


@pytest.mark.sampled
@odd
@pytest.mark.parametrize(
    "field",
    ["rank", "world_size", "attempt", "timeout", "grace", "kwargs", "entrypoint", "version"],
)
def test_no_field_of_a_spec_raises_anything_else(field, value):
    data = {**ReplicaSpec("m:f", {}, 0, 1).to_dict(), field: value}
    with contextlib.suppress(InvalidRequestError, SpecVersionError):
        ReplicaSpec.from_dict(data)


@pytest.mark.sampled
@odd
@pytest.mark.parametrize("name", ["since", "until", "regex", "streams"])
def test_no_choice_of_lines_raises_anything_else(name, value):
    executor = Memory({})
    (handle,) = executor.launch_replicas(1, "m:f", run_id="a")
    if name == "regex" and isinstance(value, (str, bytes)):
        value = "(" * 2000
    with pytest.raises(InvalidRequestError):
        list(executor.log_iter(handle, **{"streams": "stdout", name: value}))


@pytest.mark.parametrize(
    "regex", ["a{99999999999999999999}", "(" * 20_000, "(?P<a", "\\", "(?a)(?u)"]
)
def test_regular_expressions_that_python_cannot_take(regex):
    executor = Memory({})
    (handle,) = executor.launch_replicas(1, "m:f", run_id="a")
    with pytest.raises(InvalidRequestError, match="is not a regular expression"):
        executor.log_iter(handle, regex=regex, streams="stdout")


@pytest.mark.sampled
@odd
def test_what_is_no_name_of_a_run(value, tmp_path):
    executor = Memory({})
    for verb in (executor.attach, executor.cancel_run):
        with pytest.raises(BackendError):
            verb(value)


def test_control_characters_of_a_handle_are_shown_as_text_in_every_error():
    odd = "\x1b[2J\x00\u202e\r"
    handle = ReplicaHandle(0, "memory", {odd: odd}, run_id="a")
    elsewhere = ReplicaHandle(0, odd, run_id="a")
    unnamed = ReplicaHandle(0, "memory", run_id=odd)
    executor = Memory({})
    for wrong in (handle, elsewhere, unnamed):
        with pytest.raises(BackendError) as caught:
            executor.describe(wrong)
        assert str(caught.value).isprintable()
        assert "\\x1b" in str(caught.value)

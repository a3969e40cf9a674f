"""One way to ask for GPUs, on every backend."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_protocol import InvalidRequestError
from diloco_protocol.backend import GpuRequest, parse_gpu


@pytest.mark.parametrize(
    ("text", "name", "count"),
    [
        ("2", "any", 2),
        ("any:3", "any", 3),
        ("ANY", "any", 1),
        ("A100", "A100", 1),
        ("A100:2", "A100", 2),
        (" H200:1 ", "H200", 1),
        ("A100-80GB:8", "A100-80GB", 8),
        ("RTX 4090:2", "RTX 4090", 2),
        ("ml.p5_x", "ml.p5_x", 1),
        ("H100!", "H100!", 1),
        ("B200+:4", "B200+", 4),
    ],
)
def test_what_is_understood(text, name, count):
    assert parse_gpu(text) == GpuRequest(name, count)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0",
        "A100:0",
        "A100:",
        ":2",
        "A100:x",
        "any:-1",
        "H100:2:3",
        "2:2",
        "²",
        "A  B",
        "A :2",
        "!",
        "A!!",
        "A!B",
        "1" * 5000,
        "A100:" + "1" * 5000,
    ],
)
def test_what_is_refused(text):
    with pytest.raises(InvalidRequestError) as caught:
        parse_gpu(text)
    assert str(caught.value).startswith(f"gpu={text!r}"[:150])
    assert "is not a request for GPUs: give a model ('H100')" in str(caught.value)


@given(st.from_regex(r"[A-Za-z][A-Za-z0-9.-]{0,8}", fullmatch=True), st.integers(1, 10**6))
def test_name_and_count_come_back(name, count):
    expected = "any" if name.lower() == "any" else name
    assert parse_gpu(f"{name}:{count}") == GpuRequest(expected, count)


@given(st.text(max_size=12))
def test_any_text_is_understood_or_refused_by_name(text):
    try:
        count = parse_gpu(text).count
    except InvalidRequestError as error:
        assert str(error).startswith(f"gpu={text!r} ")  # noqa: PT017 - either is right
    else:
        assert count >= 1

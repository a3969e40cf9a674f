"""Amounts of CPU and memory."""

from fractions import Fraction

import pytest

from diloco_eks._request._quantities import check_bytes, check_cpu, parse_quantity
from diloco_protocol import InvalidRequestError


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("4", 4),
        ("0.5", Fraction(1, 2)),
        (".5", Fraction(1, 2)),
        ("5.", 5),
        ("250m", Fraction(1, 4)),
        ("1k", 1000),
        ("16Gi", 16 * 1024**3),
        ("1.5Ti", Fraction(3, 2) * 1024**4),
        ("2e3", 2000),
        ("1E", 10**18),
        ("7u", Fraction(7, 10**6)),
    ],
)
def test_quantities(text, amount):
    assert parse_quantity(text) == amount


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Gi",
        "16GB",
        "16 Gi",
        "-1",
        "1,5",
        "0x10",
        "1e",
        "1KI",
        "\N{ARABIC-INDIC DIGIT ONE}",
        "16Gib",
    ],
)
def test_other_text_is_none(text):
    assert parse_quantity(text) is None


@pytest.mark.parametrize("value", ["0", "0.1m", "four", "", True, None, [4]])
def test_cpus_that_are_refused(value):
    with pytest.raises(InvalidRequestError, match="cpu must be"):
        check_cpu("cpu", value)


def test_numbers_become_text():
    assert [check_cpu("cpu", value) for value in (4, 0.5, "500m")] == ["4", "0.5", "500m"]


def test_common_slips_are_explained():
    with pytest.raises(InvalidRequestError, match="say '16G'"):
        check_bytes("memory", "16GB")
    with pytest.raises(InvalidRequestError, match="say '16Gi'"):
        check_bytes("memory", "16 GiB")
    with pytest.raises(InvalidRequestError, match="16 bytes"):
        check_bytes("memory", "16")
    with pytest.raises(InvalidRequestError, match=r"0\.4 bytes"):
        check_bytes("memory", "400m")


@pytest.mark.parametrize(
    "text", ["9" * 5000, "1." + "9" * 5000, "." + "9" * 5000, "9" * 5000 + "Gi"]
)
def test_a_number_of_any_length_is_none(text):
    assert parse_quantity(text) is None
    for check in (check_cpu, check_bytes):
        for value in (text, 1 << 20_000):
            with pytest.raises(InvalidRequestError, match="must be a quantity") as caught:
                check("memory", value)
            assert len(str(caught.value)) < 400

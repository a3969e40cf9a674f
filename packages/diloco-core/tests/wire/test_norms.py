"""The norms in the file of a contribution: every bit of them is checked before they are used."""

import math

import pytest
from damage_lab import InMemory, flip
from hypothesis import given
from hypothesis import strategies as st

from diloco_core import CorruptedObjectError
from diloco_core._wire._norms import norms_part, norms_section, read_norms

BEFORE = b"12345678"  # at least the length of a header comes before them


def read(data, count, seed=7):
    return read_norms(InMemory(BEFORE + data, "x"), norms_section(count, seed), len(BEFORE), "x")


@given(st.lists(st.floats(0, allow_nan=False, allow_infinity=False), max_size=5))
def test_they_come_back_to_the_last_bit(norms):
    assert read(norms_part(norms_section(len(norms), 7), norms), len(norms)) == tuple(norms)


@pytest.mark.parametrize("norms", [[], [0.0], [1.5, 1e-300, 3e38]])
def test_every_bit(norms):
    data = norms_part(norms_section(len(norms), 7), norms)
    harmed = [flip(data, bit) for bit in range(8 * len(data))]
    for one in [*harmed, *(data[:size] for size in range(len(data)))]:
        with pytest.raises(CorruptedObjectError):
            read(one, len(norms))


def test_those_of_another_place():
    data = norms_part(norms_section(2, 7), [1.0, 2.0])
    with pytest.raises(CorruptedObjectError):
        read(data, 2, seed=8)


@pytest.mark.parametrize("norm", [math.nan, math.inf, -1.0])
def test_what_is_no_norm_is_refused_although_its_checksum_is_right(norm):
    with pytest.raises(CorruptedObjectError, match="not a finite number"):
        read(norms_part(norms_section(1, 7), [norm]), 1)


def test_a_file_that_is_too_short():
    with pytest.raises(CorruptedObjectError, match="truncated"):
        read_norms(InMemory(b"123", "x"), norms_section(1, 7), -13, "x")

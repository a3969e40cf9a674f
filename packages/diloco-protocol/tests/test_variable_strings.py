"""Environment variables that travel as strings."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_protocol import InvalidRequestError
from diloco_protocol.backend import variables_from_strings, variables_to_strings


@given(
    st.dictionaries(st.text(min_size=1), st.text(), max_size=5),
    st.integers(1, 300),
    st.dictionaries(st.sampled_from(["DILOCO_SPEC_0", "other"]), st.text()),
)
def test_they_come_back_exactly_in_pieces_that_fit(variables, size, others):
    strings = variables_to_strings(variables, piece_bytes=size)
    assert all(0 < len(piece) <= size for piece in strings.values())
    assert variables_from_strings({**others, **strings}) == variables
    assert bool(strings) == bool(variables)


@pytest.mark.parametrize(
    ("strings", "said"),
    [
        ({"DILOCO_ENV_1": "eA=="}, "lacks DILOCO_ENV_0"),
        ({"DILOCO_ENV_0": "%"}, "damaged"),
        ({"DILOCO_ENV_0": "W10="}, "not a JSON object of text"),
        ({"DILOCO_ENV_0": "eyJhIjoxfQ=="}, "not a JSON object of text"),
    ],
)
def test_what_is_damaged_is_refused(strings, said):
    with pytest.raises(InvalidRequestError, match=said):
        variables_from_strings(strings)

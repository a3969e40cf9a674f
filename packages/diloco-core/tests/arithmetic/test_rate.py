"""Learning rates in keys and records, and which one a sync takes."""

import math
import struct

from hypothesis import example, given
from hypothesis import strategies as st

from diloco_core._arithmetic._rate import NO_RATE, Proposal, Rate, chosen, digits, values_of

VALUES = st.floats(5e-324, 1.7e308)
RATES = st.builds(
    Rate,
    st.lists(VALUES, min_size=1, max_size=3).map(tuple),
    st.integers(0, 999_999_999),
    st.integers(0, 99_999),
)


@given(RATES)
@example(Rate((0.1,)))
@example(Rate((5e-324, 1.0), 1, 2))
def test_the_text_of_a_rate_is_the_rate_to_the_last_bit(rate):
    assert Rate.parse(rate.text) == rate


def test_no_rate_is_no_text():
    assert NO_RATE.text == ""
    assert Rate.parse("") == NO_RATE


@given(st.floats())
def test_only_positive_numbers_are_rates(value):
    allowed = 0 < value < math.inf
    assert values_of(struct.pack(">d", value).hex()) == ((value,) if allowed else None)
    assert (Rate.parse(f"0-0-{digits([value])}") is not None) == allowed


@given(st.text("0123456789abcdef-. ", max_size=40))
@example("0-0-")
@example("1-2-3fe00000000000000")
@example("01-2-3fe0000000000000")
@example("0--3fe0000000000000")
def test_what_can_be_read_is_written_in_only_one_way(text):
    rate = Rate.parse(text)
    assert rate is None or rate.text == text


@given(st.lists(st.tuples(st.booleans(), VALUES), min_size=1, max_size=5), RATES)
def test_the_greatest_rank_of_those_that_ask_is_heard(replicas, last):
    """If nobody asks, the rate stays as it is."""
    proposals = [Proposal(last, (value,) if asks else ()) for asks, value in replicas]
    rate = chosen(proposal.rate(rank) for rank, proposal in enumerate(proposals))
    asking = [rank for rank, (asks, _) in enumerate(replicas) if asks]
    if not asking:
        assert rate == last
        return
    assert rate == Rate((replicas[asking[-1]][1],), last.number + 1, asking[-1])


@given(st.lists(VALUES, min_size=1, max_size=5))
def test_of_functions_that_differ_that_of_rank_0_counts(values):
    proposals = [Proposal(Rate((value,))) for value in values]
    rate = chosen(proposal.rate(rank) for rank, proposal in enumerate(proposals))
    assert rate == Rate((values[0],))

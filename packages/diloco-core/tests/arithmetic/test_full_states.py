"""Which published states hold all values, and which ones a state is made of (of elastic runs: elastic/records/test_rules.py)."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from diloco_core._arithmetic._full_states import FullStates


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 3), st.integers(1, 60))
def test_states_that_are_needed(every, fragments, begin, syncs):
    """From any sync back to the newest whole state of the fragment, without a gap; fragments take turns from any of them."""
    turns = [*range(fragments)]
    turns += [(begin + number) % fragments for number in range(syncs)]
    for fragment in range(fragments):
        full = FullStates(every, fragment, fragments)
        own = [sync for sync, turn in enumerate(turns) if turn == fragment]
        assert full.is_full(own[0])
        for position, sync in enumerate(own):
            needed = full.needed(sync)
            assert needed == own[position + 1 - len(needed) : position + 1]
            assert [full.is_full(each) for each in needed] == [True] + [False] * (len(needed) - 1)
            assert len(needed) <= every + (begin > 0)
        whole = [position for position, sync in enumerate(own) if full.is_full(sync)]
        assert all(b - a == every for a, b in itertools.pairwise(whole[1:]))

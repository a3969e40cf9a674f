"""The index lists of a Job's status."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from diloco_localcloud._kubernetes._jobs import _status


@given(st.sets(st.integers(0, 60)))
def test_index_lists(indexes):
    assert _status.parse_indexes(_status.index_text(indexes)) == indexes


def test_index_lists_as_observed():
    written = [_status.index_text(indexes) for indexes in ({1, 2}, {0, 1, 2}, {0, 2, 3}, set())]
    assert written == ["1,2", "0-2", "0,2,3", ""]

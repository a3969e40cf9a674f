"""The Job controller's notation for indexes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_eks._state._indexes import expand_indexes
from diloco_eks._state._reading import read_job
from diloco_protocol import BackendError


def written(indexes):
    """As the controller writes them: three or more neighbours become a span."""
    spans = []
    for index in sorted(indexes):
        if spans and spans[-1][1] == index - 1:
            spans[-1][1] = index
        else:
            spans.append([index, index])
    texts = []
    for first, last in spans:
        texts += (
            [str(first)]
            if first == last
            else [f"{first},{last}"]
            if last == first + 1
            else [f"{first}-{last}"]
        )
    return ",".join(texts)


@given(st.frozensets(st.integers(0, 40)))
def test_what_the_controller_writes_is_read(indexes):
    assert expand_indexes(written(indexes), 41) == indexes


@pytest.mark.parametrize(
    ("text", "found"), [("", ()), ("1,2", (1, 2)), ("0-2", (0, 1, 2)), ("0,2,3", (0, 2, 3))]
)
def test_strings_that_were_observed(text, found):
    assert expand_indexes(text, 4) == frozenset(found)


@given(st.text(st.sampled_from("0123456789-, x"), min_size=1, max_size=12), st.integers(0, 50))
def test_text_is_understood_whole_or_refused(text, completions):
    try:
        found = expand_indexes(text, completions)
    except BackendError:
        return
    assert set(expand_indexes(written(found), completions)) == set(found)
    assert found <= set(range(completions))
    assert not set(text) - set("0123456789-,")


@pytest.mark.parametrize("text", ["1,,2", "1-", "-1", "a", "3-1", "4", "1 ,2", "9" * 5000, "1-2-3"])
def test_malformed_text_is_an_error(text):
    with pytest.raises(BackendError, match="lists the indexes"):
        expand_indexes(text, 4)


def test_a_job_whose_indexes_make_no_sense_is_an_error(bench, a_job):
    """No token is dropped in silence, which would leave a rank with a wrong state."""
    with pytest.raises(BackendError, match="lists the indexes"):
        read_job(a_job(4, {"completedIndexes": "0,x-2"}))
    run = bench.launch(2)
    assert "rank" not in run.handles[1].metadata

"""A fault that would never happen is refused, so that no test passes because of a word."""

from pathlib import Path

import pytest

from diloco_core import ConfigurationError
from diloco_core.testing import DAMAGES, KINDS, Fault

README = Path(__file__).parents[2] / "README.md"


@pytest.mark.parametrize(
    "kind", ["kill", "lose", "clock jump", "flipped bit", "nonsense", "", None]
)
def test_unknown_kinds_are_refused_and_the_known_ones_are_named(kind):
    with pytest.raises(ConfigurationError) as caught:
        Fault(1, 1, 30, kind)
    assert all(repr(known) in str(caught.value) for known in (*KINDS, *DAMAGES))
    assert repr(kind) in str(caught.value)


def test_the_readme_lists_the_kinds_that_there_are():
    text = README.read_text()
    list_of_kinds = text[text.index("What a `Fault` can be:") :]
    words = list_of_kinds[: list_of_kinds.index(". ")].split("`")[3::2]
    assert sorted(words) == sorted([*KINDS, *DAMAGES])

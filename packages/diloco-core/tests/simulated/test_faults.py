"""A fault that would never happen is refused, so that no test passes because of a word."""

import re

import pytest

from diloco_core import ConfigurationError
from simulated import DAMAGES, KINDS, Fault


@pytest.mark.parametrize(
    "kind", ["kill", "lose", "clock jump", "flipped bit", "nonsense", "", None]
)
def test_unknown_kinds_are_refused_and_the_known_ones_are_named(kind):
    with pytest.raises(ConfigurationError) as caught:
        Fault(1, 1, 30, kind)
    assert all(repr(known) in str(caught.value) for known in (*KINDS, *DAMAGES))
    assert repr(kind) in str(caught.value)


def test_the_documentation_explains_the_kinds_that_there_are():
    assert sorted(re.findall(r'\* ``"([a-z ]+)"``: ', Fault.__doc__)) == sorted([*KINDS, *DAMAGES])

"""As many examples of the toy backend as a user's own backend gets."""

import pytest
import test_toy

from diloco_conformance import ExecutorConformance

pytestmark = pytest.mark.slow


class TestToy(test_toy.TestToy):
    examples = ExecutorConformance.examples


class TestToyGang(test_toy.TestToyGang):
    examples = ExecutorConformance.examples

"""The standard suite, over gRPC with calls that the suite moves."""

import pytest
from scripted_modal import ModalHarness

from diloco_conformance import ExecutorConformance


@pytest.mark.slow
class TestModal(ExecutorConformance):
    examples = 40
    steps = 30
    fresh = True

    def make_harness(self):
        return ModalHarness()

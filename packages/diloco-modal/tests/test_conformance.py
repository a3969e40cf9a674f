"""The standard suite, over gRPC with calls that the suite moves."""

import pytest
from scripted_modal import ModalHarness

from diloco_conformance import ExecutorConformance


class TestModal(ExecutorConformance):
    examples = 1

    def make_harness(self):
        return ModalHarness()


@pytest.mark.slow
class TestModalLong(TestModal):
    examples = 40
    fresh = True

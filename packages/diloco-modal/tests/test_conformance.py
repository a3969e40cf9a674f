"""The standard suite, over gRPC with calls that the suite moves."""

import pytest
from scripted_modal import ModalHarness

from diloco_conformance import ExecutorConformance


class TestModal(ExecutorConformance):
    examples = 1

    def make_harness(self):
        return ModalHarness()


@pytest.mark.slow
def test_many_sequences(request):
    """All that a long form of ``TestModal`` would add to it."""

    class Long(TestModal):
        examples = 40
        fresh = True

    Long().test_any_sequence_keeps_every_promise(request)

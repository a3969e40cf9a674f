"""The standard suite, over gRPC with calls that the suite moves."""

import pytest
from scripted_modal import ModalHarness

from diloco_conformance import ExecutorConformance


class TestModal(ExecutorConformance):
    examples = 2

    def make_harness(self):
        return ModalHarness()

    @pytest.mark.xfail(
        reason="cancel_run looks at each rank, marks it and cancels it: more calls than two for each"
    )
    def test_c7_where_the_scope_is_the_run_one_call_is_enough(self, lab):
        super().test_c7_where_the_scope_is_the_run_one_call_is_enough(lab)


@pytest.mark.slow
class TestModalLong(TestModal):
    examples = 40
    steps = 30
    fresh = True

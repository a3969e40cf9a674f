"""The standard suite, on a machine without processes and on this one."""

import pytest
from real_world import RealHarness
from scripted_world import ScriptedHarness

from diloco_conformance import ExecutorConformance


@pytest.mark.slow
class TestScripted(ExecutorConformance):
    examples = 150
    fresh = True

    def make_harness(self):
        return ScriptedHarness()


@pytest.mark.processes
class TestReal(ExecutorConformance):
    examples = 3
    steps = 15
    shrink = False  # it would take many real seconds

    def make_harness(self):
        return RealHarness()


@pytest.mark.processes
@pytest.mark.slow
def test_many_sequences(request):
    """All that a long form of ``TestReal`` would add to it."""

    class Long(TestReal):
        examples = 10
        fresh = True
        steps = 30

    Long().test_any_sequence_keeps_every_promise(request)

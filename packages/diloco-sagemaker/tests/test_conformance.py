"""The standard suite, over HTTP with training jobs that the suite moves."""

import pytest
from scripted_aws import OnDemandHarness, SpotHarness

from diloco_conformance import ExecutorConformance


class TestSpot(ExecutorConformance):
    """What is promised on demand, and interruptions besides."""

    examples = 1

    def make_harness(self):
        return SpotHarness()


@pytest.mark.slow
class TestOnDemand(ExecutorConformance):
    examples = 6

    def make_harness(self):
        return OnDemandHarness()


@pytest.mark.slow
def test_many_sequences(request):
    """All that a long form of ``TestSpot`` would add to it."""

    class Long(TestSpot):
        examples = 8
        fresh = True

    Long().test_any_sequence_keeps_every_promise(request)

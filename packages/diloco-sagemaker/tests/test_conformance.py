"""The standard suite, over HTTP with training jobs that the suite moves."""

import pytest
from scripted_aws import OnDemandHarness, SpotHarness

from diloco_conformance import ExecutorConformance


class TestSpot(ExecutorConformance):
    """What is promised on demand, and interruptions besides."""

    examples = 2

    def make_harness(self):
        return SpotHarness()


@pytest.mark.slow
class TestOnDemand(ExecutorConformance):
    examples = 20

    def make_harness(self):
        return OnDemandHarness()


@pytest.mark.slow
class TestSpotLong(TestSpot):
    examples = 30
    fresh = True

"""The standard suite, with training jobs that really run."""

import pytest
from real_aws import RealAWSHarness

from diloco_conformance import ExecutorConformance


@pytest.mark.processes
@pytest.mark.slow
class TestRehearsal(ExecutorConformance):
    """Training jobs are processes of this machine, on spot."""

    examples = 2
    steps = 10
    shrink = False  # it would take many real seconds

    @pytest.fixture(autouse=True)
    def folder(self, tmp_path):
        self.shared = tmp_path

    def make_harness(self):
        return RealAWSHarness(self.shared)

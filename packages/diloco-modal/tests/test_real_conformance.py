"""The standard suite, with calls that really run."""

import pytest
from real_modal import RealModalHarness, image

from diloco_conformance import ExecutorConformance
from diloco_localcloud import ModalProcesses


@pytest.mark.processes
@pytest.mark.slow
class TestRehearsal(ExecutorConformance):
    """Containers are processes of this machine."""

    examples = 2
    steps = 10
    shrink = False  # it would take many real seconds

    @pytest.fixture(autouse=True)
    def workspace(self, tmp_path):
        with ModalProcesses(env=image(), grace_seconds=10.0) as stand_in:
            self.stand_in, self.shared = stand_in, tmp_path
            yield

    def make_harness(self):
        return RealModalHarness(self.stand_in, self.shared)

"""The standard suite, with calls that really run."""

import pytest
from real_modal import PATIENCE, RealModalHarness, image

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
        # Containers end by themselves, and on a busy machine they need time to write that down.
        with ModalProcesses(env=image(), grace_seconds=PATIENCE) as stand_in:
            self.stand_in, self.shared = stand_in, tmp_path
            yield

    def make_harness(self):
        return RealModalHarness(self.stand_in, self.shared)

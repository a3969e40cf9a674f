"""The standard suite, on a machine without processes and on this one."""

from real_world import RealHarness
from scripted_world import ScriptedHarness

from diloco_conformance import ExecutorConformance


class TestScripted(ExecutorConformance):
    def make_harness(self):
        return ScriptedHarness()


class TestReal(ExecutorConformance):
    examples = 3
    steps = 15

    def make_harness(self):
        return RealHarness()

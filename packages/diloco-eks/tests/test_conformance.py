"""The standard suite over HTTP, with the real client: runs that fail as one, and runs that go on."""

from scripted_cluster import ClusterHarness

from diloco_conformance import ExecutorConformance


class TestFailRun(ExecutorConformance):
    def make_harness(self):
        return ClusterHarness()


class TestContinue(ExecutorConformance):
    def make_harness(self):
        return ClusterHarness(on_replica_failure="continue")

"""The standard suite: pods that it moves over HTTP, pods that really run, and a real cluster."""

import os
import sys

import pytest
from exec_puppets import executor_options
from live_cluster import live_cluster
from real_cluster import RealClusterHarness
from scripted_cluster import ClusterHarness

from diloco_conformance import ExecutorConformance, Puppets, Step
from diloco_conformance._lab import Lab
from diloco_localcloud import KubernetesProcesses


@pytest.mark.slow
class TestFailRun(ExecutorConformance):
    examples = 80
    fresh = True

    def make_harness(self):
        return ClusterHarness()


class TestContinue(ExecutorConformance):
    examples = 2

    def make_harness(self):
        return ClusterHarness(on_replica_failure="continue")


def test_a_replica_that_is_preempted_again_and_again():
    """The controller doubles its pause before each further pod; the suite's world waits with it."""
    lab = Lab(ClusterHarness())
    try:
        (replica,) = lab.up(1).replicas
        for _ in range(9):
            lab.drive(replica, Step.PREEMPT)
            lab.observe_all()
            lab.drive(replica, Step.START)
            lab.observe_all()
    finally:
        lab.close()


@pytest.mark.slow
def test_many_sequences(request):
    """All that a long form of ``TestContinue`` would add to it."""

    class Long(TestContinue):
        examples = 80
        fresh = True

    Long().test_any_sequence_keeps_every_promise(request)


@pytest.mark.processes
@pytest.mark.slow
class TestRehearsal(ExecutorConformance):
    """Pods are processes of this machine."""

    examples = 3
    steps = 12
    shrink = False  # it would take many real seconds

    @pytest.fixture(autouse=True)
    def cluster(self, tmp_path):
        with KubernetesProcesses(tls=False, backoff_seconds=0.5) as stand_in:
            self.kubeconfig = stand_in.kubeconfig(tmp_path / "kubeconfig")
            self.shared = tmp_path
            yield

    def make_harness(self):
        path = os.pathsep.join([str(Puppets.source), *(entry for entry in sys.path if entry)])
        options = {"env": {"PYTHONPATH": path}, "cpu_request": "1", "memory_request": "1Gi"}
        return RealClusterHarness(
            self.kubeconfig, image="any/image:1", options=options, shared=self.shared
        )


class ByExec(ExecutorConformance):
    """Pods that share nothing with the test; they are reached by ``exec``."""

    shrink = False


@pytest.mark.processes
@pytest.mark.slow
class TestByExec(ByExec):
    """What ``TestLive`` does, on this machine."""

    examples = 2
    steps = 10

    @pytest.fixture(autouse=True)
    def cluster(self, tmp_path):
        with KubernetesProcesses(tls=False, backoff_seconds=0.5) as stand_in:
            self.kubeconfig = stand_in.kubeconfig(tmp_path / "kubeconfig")
            yield

    def make_harness(self):
        return RealClusterHarness(self.kubeconfig, image="any/image:1", options=executor_options())


@pytest.mark.live
class TestLive(ByExec):
    """A cluster of yours, as ``live_cluster`` names it."""

    examples = 1
    steps = 10

    def make_harness(self):
        cluster = live_cluster()
        return RealClusterHarness(
            cluster.kubeconfig,
            context=cluster.context,
            image=cluster.image,
            namespace=cluster.namespace,
            options=executor_options(),
            short_timeout=30.0,
        )

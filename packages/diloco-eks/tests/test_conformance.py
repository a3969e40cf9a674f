"""The standard suite: over HTTP with pods that the suite moves, with pods that really run, and on a cluster of yours."""

import os
import sys

import pytest
from real_cluster import RealClusterHarness
from scripted_cluster import ClusterHarness

from diloco_conformance import ExecutorConformance, Puppets
from diloco_localcloud import KubernetesProcesses


class TestFailRun(ExecutorConformance):
    examples = 6

    def make_harness(self):
        return ClusterHarness()


class TestContinue(ExecutorConformance):
    examples = 6

    def make_harness(self):
        return ClusterHarness(on_replica_failure="continue")


@pytest.mark.slow
class TestFailRunLong(TestFailRun):
    examples = 80
    fresh = True


@pytest.mark.slow
class TestContinueLong(TestContinue):
    examples = 80
    fresh = True


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


@pytest.mark.live
class TestLive(ExecutorConformance):
    """A cluster of yours: KUBECONFIG, and DILOCO_LIVE_IMAGE with Python and diloco-protocol; the pods are reached by exec."""

    examples = 1
    steps = 10
    shrink = False

    @pytest.fixture(autouse=True)
    def cluster(self):
        missing = [name for name in ("KUBECONFIG", "DILOCO_LIVE_IMAGE") if not os.environ.get(name)]
        if missing:
            pytest.skip(f"set {' and '.join(missing)} to run the suite on a cluster")

    def make_harness(self):
        source = (Puppets.source / "puppet.py").read_text(encoding="utf-8")
        program = 'import os; open("/puppets/puppet.py", "w").write(os.environ["PUPPET"])'
        command = f"python -c '{program}' && exec python -m diloco_protocol.runner \"$@\""
        mount = {"name": "puppets", "mountPath": "/puppets"}
        overlay = {
            "spec": {
                "volumes": [{"name": "puppets", "emptyDir": {}}],
                "containers": [{"name": "replica", "volumeMounts": [mount]}],
            }
        }
        options = {
            "command": ["sh", "-c", command, "runner"],
            "env": {"PYTHONPATH": "/puppets", "PUPPET": source},
            "pod_overlay": overlay,
            "cpu_request": "100m",
            "memory_request": "256Mi",
        }
        namespace = os.environ.get("DILOCO_LIVE_NAMESPACE", "default")
        image = os.environ["DILOCO_LIVE_IMAGE"]
        return RealClusterHarness(
            os.environ["KUBECONFIG"],
            image=image,
            namespace=namespace,
            options=options,
            short_timeout=60.0,
        )

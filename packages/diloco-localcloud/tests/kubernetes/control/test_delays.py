"""The delays that strict timing draws."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from diloco_localcloud import KubernetesProcesses
from diloco_localcloud._kubernetes import _stand_ins
from diloco_localcloud._kubernetes._control._job_controller import BATCH, FLUSH
from diloco_localcloud._kubernetes._processes import _kubelet, _sandbox
from diloco_localcloud._server._http import Request
from diloco_localcloud._server._timeline import Timeline

# From an exit to the status of the Job. The least: another pod has the controller look as soon as
# the phase is there. The most: it has looked at the end of the container just before the phase is
# there, and looks once more.
LEAST = _kubelet.HEARD.least + _kubelet.PHASE.least
MOST = _kubelet.HEARD.most + _kubelet.PHASE.most + BATCH.most + FLUSH.most


@pytest.fixture
def exits(monkeypatch):
    """Containers that run nothing; how to end each by its index, while the clock stands still."""
    told = {}

    def start(self, pod, container, tell, write):
        self.containers[container["name"]] = None
        self.logs[container["name"]] = SimpleNamespace(ended=False)
        index = int(pod["metadata"]["annotations"]["batch.kubernetes.io/job-completion-index"])
        told[index] = lambda: tell({"event": "ended", "code": 0, "oom": False})
        return True

    monkeypatch.setattr(_sandbox.Sandbox, "start", start)
    monkeypatch.setattr(_stand_ins, "Timeline", lambda start, clock: Timeline(1e9))
    return told


def test_from_an_exit_to_the_status_of_its_job(clients, exits):
    lags, count = [], 5
    for seed in range(1, 20):
        stand_in = KubernetesProcesses(tls=False, strict_timing=seed)
        headers = {"authorization": f"Bearer {stand_in.token}", "content-type": "application/json"}
        path = "/apis/batch/v1/namespaces/default/jobs"
        body = json.dumps(clients.indexed("run", count)).encode()
        assert stand_in._api.handle(Request("POST", path, {}, headers, body)).status == 201
        cluster = stand_in._cluster
        with cluster.changed:
            for index in range(count):
                cluster.timeline.run_until(cluster.timeline.now() + 10)
                begun = cluster.timeline.now()
                exits[index]()
                while cluster.job("default", "run")["status"].get("succeeded", 0) == index:
                    assert cluster.timeline.step()
                lags.append(cluster.timeline.now() - begun)
    assert LEAST <= min(lags) < 1.0
    assert 2.5 < max(lags) <= MOST


def test_the_documentation_says_so():
    words = f"{LEAST:.1f} to {MOST:.1f} s"
    assert words in KubernetesProcesses.__doc__
    assert words in (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")

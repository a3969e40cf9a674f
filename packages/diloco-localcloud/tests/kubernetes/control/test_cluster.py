"""The cluster knows no controller: it is the controller that is made with the cluster."""

from __future__ import annotations

from diloco_localcloud._kubernetes._api._checks import _jobs
from diloco_localcloud._kubernetes._control._cluster import Cluster
from diloco_localcloud._kubernetes._control._job_controller import JobController
from diloco_localcloud._kubernetes._control._node import node
from diloco_localcloud._kubernetes._objects._resources import JOBS, PODS
from diloco_localcloud._server._timeline import Timeline


class Nowhere:
    """Runs no pods."""

    def __init__(self):
        self.asked = []

    def added(self, pod):
        self.asked.append(pod["metadata"]["name"])


def pods_of_a_job(*controllers):
    cluster = Cluster(Timeline(0.0), seed=0, node=node("n"))
    cluster.runtime = Nowhere()
    for controller in controllers:
        controller(cluster)
    pod = {"restartPolicy": "Never", "containers": [{"name": "main", "image": "any"}]}
    spec = {"completions": 2, "parallelism": 2, "completionMode": "Indexed", "template": {"spec": pod}}
    body = {"metadata": {"name": "run", "namespace": "default"}, "spec": spec}
    with cluster.changed:
        cluster.store.add(JOBS, _jobs.new(cluster.store.prepare(JOBS, body)))
        cluster.timeline.run_until(10.0)
        names = [pod["metadata"]["name"] for pod in cluster.store.list(PODS)]
    assert sorted(cluster.runtime.asked) == names
    return names


def test_without_a_controller_a_job_is_an_object_like_any_other():
    assert pods_of_a_job() == []


def test_a_controller_makes_its_pods():
    assert len(pods_of_a_job(JobController)) == 2

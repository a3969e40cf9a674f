"""The cluster knows no controller: it is the controller that is made with the cluster."""

from __future__ import annotations

import pytest

from diloco_localcloud._kubernetes._api._checks import _specs
from diloco_localcloud._kubernetes._control._cluster import Cluster
from diloco_localcloud._kubernetes._control._garbage import GarbageCollector
from diloco_localcloud._kubernetes._control._job_controller import JobController
from diloco_localcloud._kubernetes._control._nodes import Node
from diloco_localcloud._kubernetes._objects._resources import JOBS, PODS
from diloco_localcloud._kubernetes._pods import _states
from diloco_localcloud._server._timeline import Timeline


class Nowhere:
    """Runs no pods."""

    def __init__(self):
        self.asked = []

    def added(self, pod):
        self.asked.append(pod["metadata"]["name"])

    def removed(self, pod):
        self.asked.remove(pod["metadata"]["name"])


@pytest.fixture
def cluster():
    made = Cluster(Timeline(0.0), seed=0, nodes=[Node("n").manifest()])
    made.runtime = Nowhere()
    return made


def add_job(cluster):
    pod = {"restartPolicy": "Never", "containers": [{"name": "main", "image": "any"}]}
    spec = {
        "completions": 2,
        "parallelism": 2,
        "completionMode": "Indexed",
        "template": {"spec": pod},
    }
    body = {"metadata": {"name": "run", "namespace": "default"}, "spec": spec}
    cluster.store.add(JOBS, _specs.new_job(cluster.store.prepare(JOBS, body)))


def pods_at(cluster, moment):
    cluster.timeline.run_until(moment)
    pods = cluster.store.list(PODS)
    assert sorted(cluster.runtime.asked) == [pod["metadata"]["name"] for pod in pods]
    return pods


def test_without_a_controller_a_job_is_an_object_like_any_other(cluster):
    with cluster.changed:
        add_job(cluster)
        assert pods_at(cluster, 1000.0) == []


def test_a_controller_makes_its_pods_again_after_the_back_off_that_it_was_given(cluster):
    JobController(cluster, backoff_seconds=4.0)
    with cluster.changed:
        add_job(cluster)
        first, _ = pods_at(cluster, 10.0)
        now = cluster.timeline.stamp()
        gone = _states.with_condition(first, "Ready", true=False, now=now)
        cluster.put_pod(_states.with_status(gone, phase="Failed"))
        assert len(pods_at(cluster, 13.5)) == 2
        assert len(pods_at(cluster, 14.5)) == 3


def test_a_pod_that_was_held_only_by_its_job_does_not_keep_the_others(cluster):
    GarbageCollector(cluster)
    JobController(cluster)
    with cluster.changed:
        add_job(cluster)
        first, _ = pods_at(cluster, 10.0)
        cluster.put_pod(_states.with_status(first, phase="Failed"))
        cluster.delete_pod(
            "default", first["metadata"]["name"]
        )  # it stays until the controller has counted it
        cluster.delete_job("default", "run", "Background")
        assert pods_at(cluster, 60.0) == []

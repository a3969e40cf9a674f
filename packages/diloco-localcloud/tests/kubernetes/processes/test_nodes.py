"""Several nodes whose pods are processes, and images that cannot be pulled."""

from __future__ import annotations

import pytest
from processes_lab import SLEEP, ended, up
from standin_lab import PATIENCE

from diloco_localcloud import KubernetesProcesses, Node, StandInError
from diloco_localcloud._kubernetes._objects._resources import EVENTS


@pytest.fixture
def stand_in():
    nodes = [Node("a", {"kind": "a"}), Node("b", {"kind": "b"}, taints=["kept:NoSchedule"])]
    with KubernetesProcesses(namespace="ns", backoff_seconds=0.5, nodes=nodes) as running:
        running._jobs.batch_seconds = 0.05  # the lag of the real one is tested on the virtual clock
        yield running


@pytest.mark.processes
def test_pods_are_placed(clients, stand_in, run):
    run(SLEEP, template={"nodeSelector": {"kind": "b"}})
    said = "1 node(s) had untolerated taint {kept: }"

    def refused():
        listed = stand_in._cluster.store.list(EVENTS)
        return any(said in event["message"] for event in listed)

    stand_in.pods.wait_for(refused, PATIENCE)
    clients.core.patch_node(name="b", body={"spec": {"taints": None}})
    up(clients, stand_in)
    assert stand_in.pods.newest("run", 0, "ns").json["spec"]["nodeName"] == "b"


@pytest.mark.processes
def test_an_image_that_cannot_be_pulled(clients, stand_in, run):
    stand_in.images.first_seconds = 0.5
    stand_in.images.refuse("any")
    run("pass")

    def refused():
        found = stand_in.pods.of("run", "ns")
        statuses = found[0].json["status"].get("containerStatuses", []) if found else []
        return statuses and statuses[0]["state"]["waiting"]["reason"] == "ErrImagePull"

    stand_in.pods.wait_for(refused, PATIENCE)
    stand_in.images.allow("any")
    assert ended(stand_in)["exitCode"] == 0


@pytest.mark.parametrize("more", [{"resources": {"cpu": "1"}}, {"labels": {"kind": "a"}}])
def test_what_belongs_to_each_node(more):
    with pytest.raises(StandInError, match="with nodes, each has its own"):
        KubernetesProcesses(nodes=[Node("a")], **more)

"""Several nodes whose pods are processes: partitioned, found and removed.

And images that cannot be pulled.
"""

from __future__ import annotations

import pytest
from processes_lab import SLEEP, alive, ended, up
from standin_lab import PATIENCE

from diloco_localcloud import KubernetesProcesses, Node, StandInError
from diloco_localcloud._kubernetes._objects._resources import EVENTS

UNREACHABLE = {"key": "node.kubernetes.io/unreachable", "operator": "Exists"}
SOON = {**UNREACHABLE, "effect": "NoExecute", "tolerationSeconds": 0}


@pytest.fixture
def stand_in():
    nodes = [Node("a", {"kind": "a"}), Node("b", {"kind": "b"}, taints=["kept:NoSchedule"])]
    with KubernetesProcesses(namespace="ns", backoff_seconds=0.5, nodes=nodes) as running:
        running._jobs.batch_seconds = 0.05  # the lag of the real one is tested on the virtual clock
        running.nodes.not_ready_seconds = running.nodes.gc_seconds = 0.05
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
def test_a_partitioned_node_runs_on_and_tells_later(clients, stand_in, run, tmp_path):
    script = (
        "import os, time\n"
        "print('up', flush=True)\n"
        f"while not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.01)"
    )
    run(script, template={"nodeSelector": {"kind": "a"}, "tolerations": [UNREACHABLE]})
    up(clients, stand_in)
    pod = stand_in.pods.newest("run", 0, "ns")
    (pid,) = pod.pids
    stand_in.nodes.lose("a")
    stand_in.pods.wait_for(lambda: not ready(pod), PATIENCE)
    (tmp_path / "go").touch()
    stand_in.pods.wait_for(lambda: stand_in._kubelet._unheard, PATIENCE)
    assert not alive(pid)
    assert pod.json["status"]["phase"] == "Running"
    stand_in.nodes.found("a")
    assert ended(stand_in)["exitCode"] == 0


@pytest.mark.processes
def test_pods_of_a_removed_node_are_zombies_until_it_is_back(clients, stand_in, run):
    run(
        SLEEP,
        backoffLimitPerIndex=1,
        template={"tolerations": [SOON, {"key": "kept", "operator": "Exists"}]},
    )
    up(clients, stand_in)
    first = stand_in.pods.newest("run", 0, "ns")
    (pid,) = first.pids
    node = first.json["spec"]["nodeName"]
    stand_in.nodes.lose(node)
    stand_in.pods.wait_for(lambda: "deletionTimestamp" in first.json["metadata"], PATIENCE)
    assert alive(pid)
    stand_in.nodes.remove(node)
    stand_in.pods.wait_for(lambda: first.json is None, PATIENCE)
    assert alive(pid)  # two of one rank, as it happens on real clusters
    second = stand_in.pods.newest("run", 0, "ns")
    stand_in.pods.wait_for(lambda: second.pids, PATIENCE)
    stand_in.nodes.add(Node(node))
    stand_in.nodes.found(node)
    stand_in.pods.wait_for(lambda: not first.pids, PATIENCE)
    assert not alive(pid)
    assert alive(second.pids[0])


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


def ready(pod):
    found = [each for each in pod.json["status"]["conditions"] if each["type"] == "Ready"]
    return found[0]["status"] == "True"

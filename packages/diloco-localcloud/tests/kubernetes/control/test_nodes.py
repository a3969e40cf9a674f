"""Several nodes: pods are placed on them, and they are lost, found and removed."""

from __future__ import annotations

import pytest

from diloco_localcloud import KubernetesStandIn, Node

GPU = {"nvidia.com/gpu": "1"}


@pytest.fixture
def stand_in():
    nodes = [
        Node("cpu-0"),
        Node(
            "gpu-0",
            {"accelerator": "l4"},
            taints=["nvidia.com/gpu:NoSchedule"],
            resources={"nvidia.com/gpu": "2"},
        ),
    ]
    with KubernetesStandIn(namespace="ns", tls=False, nodes=nodes) as running:
        yield running


def job(clients, n=1, /, *, requests=None, tolerations=(), **template):
    """A Job whose index keeps its place when its pod is taken away."""
    body = clients.indexed(
        "run",
        n,
        backoffLimitPerIndex=0,
        podReplacementPolicy="Failed",
        podFailurePolicy={
            "rules": [
                {
                    "action": "Ignore",
                    "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                }
            ]
        },
        template={"tolerations": list(tolerations), **template},
    )
    (main,) = body["spec"]["template"]["spec"]["containers"]
    main["resources"] = {"requests": requests or {}, "limits": requests or {}}
    clients.create(body)
    clients.world.settle()


def events(clients, kind="Pod"):
    listed = clients.core.list_namespaced_event(
        namespace="ns", field_selector=f"involvedObject.kind={kind}"
    )
    return [(event.reason, event.message) for event in listed.items]


ON_GPUS = {"key": "nvidia.com/gpu", "operator": "Exists"}


def unreachable(seconds):
    return {
        "key": "node.kubernetes.io/unreachable",
        "operator": "Exists",
        "effect": "NoExecute",
        "tolerationSeconds": seconds,
    }


def nodes_of(clients):
    return [pod["spec"].get("nodeName") for pod in clients.pods()]


def test_pods_are_placed_and_the_others_say_why_not(clients, stand_in):
    job(clients, 3, requests=GPU, tolerations=[ON_GPUS], nodeSelector={"accelerator": "l4"})
    assert sorted(map(str, nodes_of(clients))) == ["None", "gpu-0", "gpu-0"]
    (waiting,) = [pod for pod in clients.pods() if "nodeName" not in pod["spec"]]
    why = (
        "0/2 nodes are available: 1 Insufficient nvidia.com/gpu, 1 node(s) didn't match Pod's node "
        "affinity/selector. no new claims to deallocate, preemption: 0/2 nodes are available: 1 No "
        "preemption victims found for incoming pod, 1 Preemption is not helpful for scheduling."
    )
    condition = waiting["status"]["conditions"][0]
    assert (condition["type"], condition["reason"], condition["message"]) == (
        "PodScheduled",
        "Unschedulable",
        why,
    )
    assert ("FailedScheduling", why) in events(clients)


def test_a_pod_without_a_node_cannot_run(clients, stand_in):
    job(clients, 1, requests=GPU)
    pod = clients.world.pod("run", 0, "ns")
    with pytest.raises(ValueError, match="has no node: 0/2 nodes are available"):
        pod.start()


def test_room_that_is_made_is_used(clients, stand_in):
    job(clients, 3, requests=GPU, tolerations=[ON_GPUS])
    waiting = next(index for index, node in enumerate(nodes_of(clients)) if node is None)
    done = clients.world.pod("run", (waiting + 1) % 3, "ns")
    done.start()
    done.succeed()
    clients.world.settle()
    assert nodes_of(clients) == ["gpu-0"] * 3


@pytest.mark.parametrize("change", ["add", "patch"])
def test_a_new_or_a_changed_node_is_used(clients, stand_in, change):
    job(clients, 1, requests=GPU)
    assert nodes_of(clients) == [None]
    if change == "add":
        stand_in.nodes.add(Node("gpu-1", resources={"nvidia.com/gpu": "1"}))
        assert stand_in.nodes.names == ["cpu-0", "gpu-0", "gpu-1"]
    else:  # kubectl taint node gpu-0 nvidia.com/gpu-
        clients.core.patch_node(name="gpu-0", body={"spec": {"taints": None}})
    clients.world.settle()
    assert nodes_of(clients) == ["gpu-1" if change == "add" else "gpu-0"]


def test_a_node_that_dies_takes_its_pods_along(clients, stand_in):
    """Seen on a real cluster, with tolerationSeconds 2.

    50 s nothing, then DeletionByTaintManager, and no replacement.
    """
    job(clients, 1, tolerations=[unreachable(2)])
    clients.world.pod("run", 0, "ns").start()
    clients.world.settle()
    stand_in.nodes.lose("cpu-0")
    clients.world.advance(49)
    (pod,) = clients.pods()
    assert ("deletionTimestamp" in pod["metadata"], ready(pod)) == (False, "True")
    clients.world.advance(2)
    (pod,) = clients.pods()
    assert ("deletionTimestamp" in pod["metadata"], ready(pod)) == (False, "False")
    (node,) = [
        each
        for each in clients.plain(clients.core.list_node())["items"]
        if each["metadata"]["name"] == "cpu-0"
    ]
    assert {(each["key"], each["effect"]) for each in node["spec"]["taints"]} == {
        ("node.kubernetes.io/unreachable", effect) for effect in ("NoSchedule", "NoExecute")
    }
    (condition,) = node["status"]["conditions"]
    assert (condition["status"], condition["message"]) == (
        "Unknown",
        "Kubelet stopped posting node status.",
    )
    clients.world.advance(200)
    (pod,) = clients.pods()
    assert "deletionTimestamp" in pod["metadata"]
    assert disruption(pod) == "DeletionByTaintManager"
    assert {"NodeNotReady", "TaintManagerEviction"} <= {reason for reason, _ in events(clients)}
    assert clients.job("run")["status"]["terminating"] == 1


def test_a_node_that_is_found_ends_what_was_to_go(clients, stand_in):
    job(clients, 1, tolerations=[unreachable(2)])
    first = clients.world.pod("run", 0, "ns")
    first.start()
    clients.world.settle()
    stand_in.nodes.lose("cpu-0")
    clients.world.advance(60)
    stand_in.nodes.found("cpu-0")
    clients.world.settle(within=15)
    (pod,) = clients.pods()
    assert pod["metadata"]["uid"] != first.uid
    assert pod["spec"]["nodeName"] == "cpu-0"


def test_a_node_that_is_found_in_time_has_lost_nothing(clients, stand_in):
    job(clients, 1)  # tolerates it for 300 s, as every pod
    pod = clients.world.pod("run", 0, "ns")
    pod.start()
    clients.world.settle()
    stand_in.nodes.lose("cpu-0")
    clients.world.advance(300)
    (lost,) = clients.pods()
    assert ("deletionTimestamp" in lost["metadata"], ready(lost)) == (False, "False")
    pod.succeed()  # nobody hears of it
    clients.world.advance(10)
    assert clients.job("run")["status"]["active"] == 1
    stand_in.nodes.found("cpu-0")
    clients.world.settle()
    assert clients.job("run")["status"]["succeeded"] == 1
    clients.world.advance(600)
    assert disruption(clients.pods()[0]) is None


def test_pods_of_a_node_that_is_removed_are_collected_and_replaced(clients, stand_in):
    stand_in.nodes.add(Node("cpu-1"))
    job(clients, 2, tolerations=[unreachable(2)])
    assert sorted(nodes_of(clients)) == ["cpu-0", "cpu-1"]
    for index in range(2):
        clients.world.pod("run", index, "ns").start()
    clients.world.settle()
    (victim,) = [pod for pod in clients.pods() if pod["spec"]["nodeName"] == "cpu-0"]
    stand_in.nodes.lose("cpu-0")
    clients.world.advance(100)
    clients.core.delete_node(name="cpu-0")  # what the message of diloco-eks advises
    clients.world.advance(39)
    assert victim["metadata"]["uid"] in {pod["metadata"]["uid"] for pod in clients.pods()}
    clients.world.advance(30)
    assert victim["metadata"]["uid"] not in {pod["metadata"]["uid"] for pod in clients.pods()}
    assert nodes_of(clients) == ["cpu-1", "cpu-1"]
    assert clients.job("run")["status"]["failedIndexes"] == ""


def test_nodes_that_there_are_not(stand_in):
    for verb in (stand_in.nodes.lose, stand_in.nodes.found, stand_in.nodes.remove):
        with pytest.raises(LookupError, match="there is no node other; there are cpu-0, gpu-0"):
            verb("other")


def ready(pod):
    return next(each["status"] for each in pod["status"]["conditions"] if each["type"] == "Ready")


def disruption(pod):
    return next(
        (
            each["reason"]
            for each in pod["status"]["conditions"]
            if each["type"] == "DisruptionTarget"
        ),
        None,
    )

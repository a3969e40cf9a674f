"""Pods without a node or an image, and nodes that die: told in the cluster's own words."""

import pytest

from diloco_localcloud import KubernetesStandIn, Node
from diloco_protocol import Reason

L40S = Node(
    "gpu-0",
    {"karpenter.k8s.aws/instance-gpu-name": "l40s"},
    taints=["nvidia.com/gpu=true:NoSchedule"],
    resources={"nvidia.com/gpu": "1"},
)


@pytest.fixture
def bench(a_bench, tmp_path):
    """Two nodes, one of them with a GPU."""
    with KubernetesStandIn(nodes=[Node("cpu-0"), L40S]) as stand_in:
        bench = a_bench(stand_in, tmp_path)
        yield bench
        bench.close()


def pending(run, rank=0):
    """(reason, message) of a rank that waits."""
    status = run.describe(rank)
    assert (status.state, status.started_at) == ("pending", None)
    return status.reason, status.message


def test_a_gpu_finds_its_node(bench):
    run = bench.launch(1, gpu="L40S")
    assert run.pod(0).json["spec"]["nodeName"] == "gpu-0"
    assert run.states() == ["running"]


def test_a_second_gpu_waits_and_the_scheduler_says_why(bench):
    run = bench.launch(2, gpu="L40S", start=False)
    placed = [run.pod(rank).json["spec"].get("nodeName") for rank in range(2)]
    waiting = placed.index(None)
    reason, message = pending(run, waiting)
    assert reason is Reason.UNSCHEDULABLE
    assert (
        "0/2 nodes are available: 1 Insufficient nvidia.com/gpu, 1 node(s) didn't match" in message
    )
    bench.stand_in.nodes.add(Node("gpu-1", L40S.labels, L40S.taints, L40S.resources))
    bench.world.settle()
    assert pending(run, waiting)[0] is Reason.STARTING


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gpu": "H100"}, "2 node(s) didn't match Pod's node affinity/selector"),
        (
            {"cpu": "100"},
            "1 Insufficient cpu, 1 node(s) had untolerated taint {nvidia.com/gpu: true}",
        ),
        ({"spot": True}, "1 node(s) didn't match Pod's node affinity/selector"),
    ],
)
def test_what_no_node_has(bench, options, words):
    run = bench.launch(1, start=False, **options)
    reason, message = pending(run)
    assert (reason, words in message) == (Reason.UNSCHEDULABLE, True), message


def test_an_image_that_cannot_be_pulled(bench):
    bench.stand_in.images.refuse("registry.example/trainer:1")
    run = bench.launch(1, start=False)
    for _ in range(3):  # ErrImagePull, ImagePullBackOff, ErrImagePull, ...
        reason, message = pending(run)
        assert reason is Reason.IMAGE
        assert 'failed to pull and unpack image "registry.example/trainer:1"' in message
        bench.world.advance(7)
    bench.stand_in.images.allow("registry.example/trainer:1")
    bench.world.advance(40)
    assert pending(run)[0] is Reason.STARTING
    run.pod(0).start()
    assert run.states() == ["running"]


def test_a_cancel_while_the_image_cannot_be_pulled(bench):
    bench.stand_in.images.refuse("registry.example/trainer:1")
    run = bench.launch(1, start=False)
    run.executor.cancel(run.handles[0])
    bench.world.settle(within=15)
    assert run.states() == ["cancelled"]


def test_a_dead_node_is_named_and_its_removal_helps(bench):
    """Seen on a real cluster up to the removal of the node."""
    run = bench.launch(1)
    bench.stand_in.nodes.lose("cpu-0")
    bench.world.advance(400)
    status = run.describe(0)
    assert (status.state, status.stopping, status.attempt) == ("running", True, 1)
    assert "DeletionByTaintManager" in status.message
    assert "its node cpu-0 has not answered since" in status.message
    assert status.message.endswith("run: kubectl delete node cpu-0")
    bench.stand_in.nodes.add(Node("cpu-1"))
    bench.stand_in.nodes.remove("cpu-0")
    bench.world.advance(90)
    status = run.describe(0)
    assert (status.state, status.attempt) == ("pending", 2)
    assert run.pod(0).json["spec"]["nodeName"] == "cpu-1"


def test_a_dead_node_that_comes_back(bench):
    run = bench.launch(1)
    bench.stand_in.nodes.lose("cpu-0")
    bench.world.advance(400)
    assert run.describe(0).stopping
    bench.stand_in.nodes.found("cpu-0")
    bench.world.advance(30)
    status = run.describe(0)
    assert (status.state, status.attempt, status.stopping) == ("pending", 2, False)

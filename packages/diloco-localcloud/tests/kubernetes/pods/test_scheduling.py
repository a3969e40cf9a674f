"""On which node a pod fits, in the words of the scheduler."""

from __future__ import annotations

import pytest

from diloco_localcloud import Node, StandInError
from diloco_localcloud._kubernetes._pods._scheduling import ALL, choose, full, toleration_seconds


def pod(requests=None, *, node=None, phase="Pending", **spec):
    container = {"name": "main", "resources": {"requests": requests or {}}}
    placed = {"nodeName": node} if node else {}
    return {
        "metadata": {"name": "p"},
        "spec": {"containers": [container], **placed, **spec},
        "status": {"phase": phase},
    }


def affinity(*terms):
    required = {"nodeSelectorTerms": list(terms)}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}


def asks(key, operator, *values):
    return {"matchExpressions": [{"key": key, "operator": operator, "values": list(values)}]}


def placed(nodes, wanted, pods=(), filters=ALL):
    return choose([node.manifest() for node in nodes], pods, wanted, filters)


def test_each_node_that_does_not_fit_is_counted():
    """As users of 1.34 have published such messages."""
    nodes = [
        Node("full", resources={"nvidia.com/gpu": "8"}),
        Node("other", {"zone": "b"}, resources={"nvidia.com/gpu": "8"}),
        Node("kept", taints=["dedicated=team:NoSchedule"]),
        Node("control", taints=["node-role.kubernetes.io/control-plane:NoSchedule"]),
    ]
    running = pod({"nvidia.com/gpu": "8"}, node="full")
    wanted = pod({"nvidia.com/gpu": "1"}, affinity=affinity(asks("zone", "DoesNotExist")))
    assert placed(nodes, wanted, [running]) == (
        None,
        "0/4 nodes are available: 1 Insufficient nvidia.com/gpu, 1 node(s) didn't match Pod's "
        "node affinity/selector, 1 node(s) had untolerated taint {dedicated: team}, 1 node(s) had "
        "untolerated taint {node-role.kubernetes.io/control-plane: }. no new claims to "
        "deallocate, preemption: 0/4 nodes are available: 1 No preemption victims found for "
        "incoming pod, 3 Preemption is not helpful for scheduling.",
    )


def test_what_no_node_could_ever_hold():
    """A node names all that it lacks; preemption is no help if even an empty node is too small."""
    nodes = [Node("small", resources={"cpu": "2", "pods": "0"})]
    assert placed(nodes, pod({"cpu": "2500m", "memory": "1Gi"}))[1] == (
        "0/1 nodes are available: 1 Insufficient cpu, 1 Too many pods. no new claims to "
        "deallocate, preemption: 0/1 nodes are available: 1 Preemption is not helpful for "
        "scheduling."
    )
    assert placed([], pod()) == (None, "no nodes available to schedule pods")


def test_the_node_with_the_fewest_pods_takes_it():
    nodes = [Node("a"), Node("b"), Node("c")]
    others = [pod(node="a"), pod(node="b"), pod(node="c", phase="Succeeded")]
    assert placed(nodes, pod(), others) == ("c", "")
    assert placed(nodes, pod(), [*others, pod(node="c")]) == ("a", "")


def test_what_has_ended_takes_no_room():
    node = Node("one", resources={"nvidia.com/gpu": "1"})
    wanted = pod({"nvidia.com/gpu": "1"})
    for phase, fits in [("Running", None), ("Failed", "one")]:
        taken = pod({"nvidia.com/gpu": "1"}, node="one", phase=phase)
        assert placed([node], wanted, [taken])[0] == fits


@pytest.mark.parametrize(
    ("spec", "fits"),
    [
        ({}, True),
        ({"nodeSelector": {"zone": "a"}}, True),
        ({"nodeSelector": {"zone": "b"}}, False),
        ({"nodeSelector": {"kubernetes.io/hostname": "one"}}, True),
        ({"affinity": affinity(asks("zone", "In", "a", "b"))}, True),
        ({"affinity": affinity(asks("zone", "NotIn", "a", "b"))}, False),
        ({"affinity": affinity(asks("other", "NotIn", "a"))}, True),
        ({"affinity": affinity(asks("other", "Exists"))}, False),
        ({"affinity": affinity(asks("zone", "Exists"))}, True),
        ({"affinity": affinity(asks("zone", "DoesNotExist"))}, False),
        ({"affinity": affinity(asks("count", "Gt", "7"))}, True),
        ({"affinity": affinity(asks("count", "Gt", "8"))}, False),
        ({"affinity": affinity(asks("count", "Lt", "9"))}, True),
        ({"affinity": affinity(asks("count", "Lt", "8"))}, False),
        ({"affinity": affinity(asks("zone", "Gt", "8"))}, False),
        # One of the terms, and each expression in it.
        ({"affinity": affinity(asks("zone", "In", "b"), asks("zone", "In", "a"))}, True),
        (
            {
                "affinity": affinity(
                    {
                        "matchExpressions": [
                            *asks("zone", "In", "a")["matchExpressions"],
                            *asks("count", "In", "9")["matchExpressions"],
                        ]
                    }
                )
            },
            False,
        ),
        ({"affinity": affinity({})}, False),
        ({"nodeSelector": {"zone": "a"}, "affinity": affinity(asks("zone", "In", "b"))}, False),
    ],
)
def test_selectors_and_required_affinity(spec, fits):
    node = Node("one", {"zone": "a", "count": "8"})
    assert (placed([node], pod(**spec))[0] == "one") is fits
    # Where pods are placed by resources alone, they are not looked at.
    assert placed([node], pod(**spec), filters=[full]) == ("one", "")


@pytest.mark.parametrize(
    ("toleration", "fits"),
    [
        ({"key": "gpu", "operator": "Equal", "value": "yes", "effect": "NoSchedule"}, True),
        ({"key": "gpu", "value": "yes"}, True),
        ({"key": "gpu", "value": "no"}, False),
        ({"key": "gpu", "operator": "Exists"}, True),
        ({"operator": "Exists"}, True),
        ({"key": "gpu", "operator": "Exists", "effect": "NoExecute"}, False),
        ({"key": "other", "operator": "Exists"}, False),
        ({"value": "yes"}, False),
    ],
)
def test_taints_and_tolerations(toleration, fits):
    node = Node("one", taints=["gpu=yes:NoSchedule", "seldom:PreferNoSchedule"])
    assert (placed([node], pod(tolerations=[toleration]))[0] == "one") is fits


def test_a_cordoned_node():
    node = Node("one").manifest()
    node["spec"]["unschedulable"] = True
    name, why = choose([node], [], pod(), ALL)
    assert (name, "1 node(s) were unschedulable." in why) == (None, True)
    toleration = {"key": "node.kubernetes.io/unschedulable", "operator": "Exists"}
    assert choose([node], [], pod(tolerations=[toleration]), ALL)[0] == "one"


def test_how_long_a_taint_is_tolerated():
    taint = {"key": "node.kubernetes.io/unreachable", "effect": "NoExecute"}
    for_a_while = {**taint, "operator": "Exists", "tolerationSeconds": 7}
    for_ever = {"operator": "Exists"}
    assert toleration_seconds(pod(), taint) == 0
    assert toleration_seconds(pod(tolerations=[for_a_while]), taint) == 7
    assert toleration_seconds(pod(tolerations=[for_ever]), taint) is None
    assert toleration_seconds(pod(tolerations=[for_ever, for_a_while]), taint) == 7
    other = {"key": "other", "effect": "NoExecute"}
    assert toleration_seconds(pod(tolerations=[for_a_while]), other) == 0


@pytest.mark.parametrize("taint", ["", "gpu", "gpu=yes", "gpu:Never", ":NoSchedule"])
def test_taints_that_cannot_be_read(taint):
    with pytest.raises(StandInError, match="is not a taint; write KEY=VALUE:EFFECT or KEY:EFFECT"):
        Node("one", taints=[taint])


def test_resources_that_are_not_quantities():
    with pytest.raises(StandInError, match=r"resources\['gpu'\] is not a quantity: 'many'"):
        Node("one", resources={"gpu": "many"})
    with pytest.raises(StandInError, match=r"resources\['gpu'\] is below 0: '-1'"):
        Node("one", resources={"gpu": "-1"})

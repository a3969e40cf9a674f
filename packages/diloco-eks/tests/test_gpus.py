"""GPUs by name and count."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_eks._request import _gpus as gpus
from diloco_protocol import InvalidRequestError


def matches(term, labels):
    """Whether a node matches a term, as the scheduler says."""
    return all(
        (labels.get(e["key"]) in e["values"]) is (e["operator"] == "In")
        for e in term["matchExpressions"]
    )


def admits(affinity, **labels):
    if affinity is None:
        return True
    required = affinity["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    return any(matches(term, labels) for term in required["nodeSelectorTerms"])


def test_names_counts_and_case():
    assert (gpus.place_gpus("H100").name, gpus.place_gpus("H100").count) == ("H100", 1)
    assert (gpus.place_gpus("l40s:4").name, gpus.place_gpus("l40s:4").count) == ("L40S", 4)
    assert gpus.place_gpus("2") == gpus.place_gpus("any:2") == gpus.PlacedGpus("any", 2, {})


@pytest.mark.parametrize("text", ["GB300", "H100x", "A10", "H-100", "H100 2"])
def test_unknown_names_list_the_known_ones(text):
    with pytest.raises(
        InvalidRequestError, match=re.escape(", ".join([*sorted(gpus.MODELS), "any"]))
    ):
        gpus.place_gpus(text)


@pytest.mark.parametrize("text", ["H100:9", "V100:16", "any:17"])
def test_counts_that_no_node_has(text):
    with pytest.raises(InvalidRequestError, match="a replica runs on one node"):
        gpus.place_gpus(text)


@pytest.mark.parametrize("text", ["H100:", ":2", "H100:2:3", "H100:-1", "H100:0", "0", ""])
def test_forms_that_are_none(text):
    with pytest.raises(InvalidRequestError, match="is not a request for GPUs"):
        gpus.place_gpus(text)


@given(st.sampled_from(sorted(gpus.MODELS)), st.integers(1, 8))
def test_every_kind_of_node_is_found_and_no_type_is_pinned(name, count):
    model = gpus.MODELS[name]
    if count > max(model.types.values()):
        return
    affinity = gpus.node_affinity(gpus.place_gpus(f"{name}:{count}").places, spot=None, chosen={})
    if name not in gpus.AMBIGUOUS:
        assert admits(affinity, **{gpus.KARPENTER: model.name})
        assert admits(affinity, **{gpus.AUTO_MODE: model.name})
    for product in model.products.split():
        assert admits(affinity, **{gpus.FEATURE_DISCOVERY: product})
    for kind, has in model.types.items():
        assert admits(affinity, **{gpus.INSTANCE_TYPE: kind}) is (has >= count)
        assert admits(affinity, **{gpus.INSTANCE_TYPE: f"ml.{kind}"}) is (has >= count)
    assert not admits(affinity, **{gpus.INSTANCE_TYPE: "m5.xlarge"})
    assert not admits(affinity)


def test_the_larger_a100_is_not_taken_for_the_smaller():
    affinity = gpus.node_affinity(gpus.place_gpus("A100-80GB").places, spot=None, chosen={})
    assert not admits(affinity, **{gpus.KARPENTER: "a100", gpus.INSTANCE_TYPE: "p4d.24xlarge"})
    assert admits(affinity, **{gpus.KARPENTER: "a100", gpus.INSTANCE_TYPE: "p4de.24xlarge"})


def test_part_of_an_l4_is_not_taken_for_a_whole_one():
    whole, part = (
        gpus.node_affinity(gpus.place_gpus(name).places, spot=None, chosen={})
        for name in ("L4", "L4-part")
    )
    for kind, has in (("g6.xlarge", whole), ("gr6.4xlarge", whole), ("g6f.xlarge", part)):
        node = {gpus.KARPENTER: "l4", gpus.INSTANCE_TYPE: kind}
        assert admits(whole, **node) is (has is whole)
        assert admits(part, **node) is (has is part)


@pytest.mark.parametrize("gpu", [None, "L40S"])
def test_spot_and_not_spot(gpu):
    places = gpus.place_gpus(gpu).places if gpu else {}
    node = {gpus.KARPENTER: "l40s"}
    spot, fixed = (gpus.node_affinity(places, spot=value, chosen={}) for value in (True, False))
    for label, word in ((gpus.KARPENTER_CAPACITY, "spot"), (gpus.NODE_GROUP_CAPACITY, "SPOT")):
        assert admits(spot, **node, **{label: word})
        assert not admits(fixed, **node, **{label: word})
    assert not admits(spot, **node, **{gpus.KARPENTER_CAPACITY: "on-demand"})
    assert admits(fixed, **node, **{gpus.KARPENTER_CAPACITY: "reserved"})
    assert admits(fixed, **node)


def test_the_callers_selector_wins():
    places = gpus.place_gpus("H100").places
    assert gpus.node_affinity(places, spot=None, chosen={gpus.INSTANCE_TYPE: "p5.48xlarge"}) is None
    assert gpus.node_affinity(places, spot=None, chosen={"pool": "blue"}) is not None
    assert gpus.node_affinity({}, spot=True, chosen={gpus.NODE_GROUP_CAPACITY: "SPOT"}) is None
    assert gpus.node_affinity({}, spot=False, chosen={gpus.KARPENTER_CAPACITY: "reserved"}) is None
    assert gpus.node_affinity({}, spot=None, chosen={}) is None


@pytest.mark.parametrize(
    ("spot", "chosen"),
    [
        (True, {gpus.KARPENTER_CAPACITY: "reserved"}),
        (True, {gpus.NODE_GROUP_CAPACITY: "ON_DEMAND"}),
        (False, {gpus.KARPENTER_CAPACITY: "spot"}),
    ],
)
def test_a_selector_for_another_capacity_than_that_of_the_launch_is_refused(bench, spot, chosen):
    with pytest.raises(InvalidRequestError, match=f"spot={spot} together with node_selector="):
        bench.executor(node_selector=chosen).plan(1, "trainer:train", spot=spot)

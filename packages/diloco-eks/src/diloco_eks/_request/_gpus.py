"""GPUs by name: their number, and the nodes that have them, whatever made the nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from diloco_protocol import InvalidRequestError
from diloco_protocol.backend import ANY, parse_gpu

KARPENTER = "karpenter.k8s.aws/instance-gpu-name"
AUTO_MODE = "eks.amazonaws.com/instance-gpu-name"
FEATURE_DISCOVERY = "nvidia.com/gpu.product"
INSTANCE_TYPE = "node.kubernetes.io/instance-type"
KARPENTER_CAPACITY = "karpenter.sh/capacity-type"
NODE_GROUP_CAPACITY = "eks.amazonaws.com/capacityType"

NEURON = "aws.amazon.com/neuron"
RESERVATION = "karpenter.k8s.aws/capacity-reservation-id"
RESERVATION_TYPE = "karpenter.k8s.aws/capacity-reservation-type"
BLOCK = "block"

_MOST_GPUS = 16  # of one node, if the model is not known


@dataclass(frozen=True, slots=True)
class Model:
    """A model of GPU on AWS.

    Attributes:
        name: Its name in Karpenter's and Auto Mode's label.
        products: Its names in the label of NVIDIA's GPU feature discovery, with blanks between.
        types: Instance type → GPUs of one node. Source: EKS user guide, "ml-workload-placement";
            EC2 instance types.
        resource: Name of the resource that counts them; None for GPUs of NVIDIA.
    """

    name: str
    products: str
    types: Mapping[str, int]
    resource: str | None = None


def _sizes(text: str) -> dict[str, int]:
    """Return instance types with the number of their GPUs, from ``"g5 1 xlarge 4 12xlarge"``."""
    family, *words = text.split()
    types, count = {}, 0
    for word in words:
        if word.isdigit():
            count = int(word)
        else:
            types[f"{family}.{word}"] = count
    return types


_SMALL = "1 xlarge 2xlarge 4xlarge 8xlarge 16xlarge 4 12xlarge 24xlarge 8 48xlarge"
_G4DN = _sizes("g4dn 1 xlarge 2xlarge 4xlarge 8xlarge 16xlarge 4 12xlarge 8 metal")
_P3 = _sizes("p3 1 2xlarge 4 8xlarge 8 16xlarge") | _sizes("p3dn 8 24xlarge")
_G6 = _sizes(f"g6 {_SMALL}") | _sizes("gr6 1 4xlarge 8xlarge")
_G6F = _sizes("g6f 1 large xlarge 2xlarge 4xlarge") | _sizes("gr6f 1 4xlarge")
_G7E = _sizes("g7e 1 2xlarge 4xlarge 8xlarge 2 12xlarge 4 24xlarge 8 48xlarge")
_TRN1 = _sizes("trn1 1 2xlarge 16 32xlarge") | _sizes("trn1n 16 32xlarge")
_TRN2 = _sizes("trn2 1 3xlarge 16 48xlarge") | _sizes("trn2u 16 48xlarge")
_P4DE = {"p4de.24xlarge": 8}
MODELS: Mapping[str, Model] = {
    "T4": Model("t4", "Tesla-T4", _G4DN),
    "V100": Model("v100", "Tesla-V100-SXM2-16GB Tesla-V100-SXM2-32GB", _P3),
    "A10G": Model("a10g", "NVIDIA-A10G", _sizes(f"g5 {_SMALL}")),
    "L4": Model("l4", "NVIDIA-L4", _G6),
    "L4-PART": Model("l4", "", _G6F),  # parts of an L4: an eighth to a half of its memory
    "L40S": Model("l40s", "NVIDIA-L40S", _sizes(f"g6e {_SMALL}")),
    "A100": Model(
        "a100", "NVIDIA-A100-SXM4-40GB NVIDIA-A100-SXM4-80GB", {"p4d.24xlarge": 8, **_P4DE}
    ),
    "A100-80GB": Model("a100", "NVIDIA-A100-SXM4-80GB", _P4DE),
    "H100": Model("h100", "NVIDIA-H100-80GB-HBM3", {"p5.4xlarge": 1, "p5.48xlarge": 8}),
    "H200": Model("h200", "NVIDIA-H200", {"p5e.48xlarge": 8, "p5en.48xlarge": 8}),
    "B200": Model("b200", "NVIDIA-B200", {"p6-b200.48xlarge": 8}),
    "B300": Model("b300", "NVIDIA-B300", {"p6-b300.48xlarge": 8}),
    # The models from here on are from the vendors' documents, and were not tried on a cluster.
    "GB200": Model("gb200", "NVIDIA-GB200", {"p6e-gb200.36xlarge": 4}),
    "RTX-PRO-6000": Model("rtx-pro-6000", "NVIDIA-RTX-PRO-6000-Blackwell-Server-Edition", _G7E),
    "TRAINIUM": Model("trainium", "", _TRN1, NEURON),
    "TRAINIUM2": Model("trainium2", "", _TRN2, NEURON),
}
# For these models, the label of Karpenter and Auto Mode does not distinguish variants, or is not
# known for sure, so the instance types are used.
AMBIGUOUS = frozenset({"A100-80GB", "L4", "L4-PART", "RTX-PRO-6000", "TRAINIUM", "TRAINIUM2"})


@dataclass(frozen=True, slots=True)
class PlacedGpus:
    """The GPUs of one replica, and the nodes that have them.

    Attributes:
        name: Name of the model, or ``"any"``.
        count: Number of GPUs.
        places: Label → values; a node with any of these labels has the model. Empty for any node.
        resource: Name of the resource that counts them; None for the executor's
            ``gpu_resource_key``.
    """

    name: str
    count: int
    places: Mapping[str, tuple[str, ...]]
    resource: str | None = None


def place_gpus(text: str) -> PlacedGpus:
    """Return the GPUs that ``gpu=`` asks for, and the nodes that have them.

    :func:`diloco_protocol.backend.parse_gpu` describes the text; names may be in upper or lower
    case.

    Raises:
        InvalidRequestError: The text has another form, the name is unknown (the error lists the
            known ones), or no node has so many GPUs.
    """
    wanted = parse_gpu(text)
    name, count = wanted.name.upper(), wanted.count
    most = _MOST_GPUS
    places: Mapping[str, tuple[str, ...]] = {}
    resource = None
    if name in MODELS:
        model = MODELS[name]
        most = max(model.types.values())
        places, resource = _places(name, model, count), model.resource
    elif wanted.name != ANY:
        known = ", ".join([*sorted(MODELS), ANY])
        raise InvalidRequestError(
            f"gpu={text!r}: there is no GPU {wanted.name!r}; known are {known}. For another, "
            "give the number alone and the label of its nodes in node_selector="
        )
    if count > most:
        raise InvalidRequestError(
            f"gpu={text!r}: a node has at most {most} of these, and a replica runs on one node"
        )
    return PlacedGpus(ANY if wanted.name == ANY else name, count, places, resource)


def _places(name: str, model: Model, count: int) -> dict[str, tuple[str, ...]]:
    fitting = [kind for kind, gpus in model.types.items() if gpus >= count]
    # HyperPod's nodes have SageMaker's spelling.
    types = tuple(spelling for kind in fitting for spelling in (kind, f"ml.{kind}"))
    named = {} if name in AMBIGUOUS else {KARPENTER: (model.name,), AUTO_MODE: (model.name,)}
    products = {FEATURE_DISCOVERY: tuple(model.products.split())} if model.products else {}
    return {**named, **products, INSTANCE_TYPE: types}


def node_affinity(
    places: Mapping[str, tuple[str, ...]],
    *,
    spot: bool | None,
    chosen: Mapping[str, str],
    reservation: str | None = None,
) -> dict[str, Any] | None:
    """Return the required node affinity, or None if any node will do.

    Nodes are labelled by the program that made them (Karpenter, Auto Mode, NVIDIA's discovery, a
    node group), so the terms are OR-ed: one that matches is enough.

    Args:
        places: Label → values; see :class:`PlacedGpus`.
        spot: True for interruptible capacity, False for any other, None for either.
        chosen: The caller's node selector. If it names the model or the capacity itself, we add
            nothing for that.
        reservation: Id of a capacity reservation, or ``"block"`` for any capacity block.

    Raises:
        InvalidRequestError: Both spot capacity and reserved capacity are requested, or the node
            selector names another capacity.
    """
    kinds: list[list[dict[str, Any]]] = [[]]
    if places and not chosen.keys() & places.keys():
        kinds = [[_expression(label, values)] for label, values in places.items()]
    capacities = _reserved(reservation, spot=spot) if reservation else _of_market(chosen, spot=spot)
    terms = [
        {"matchExpressions": [*kind, *capacity]} for kind, capacity in product(kinds, capacities)
    ]
    if terms == [{"matchExpressions": []}]:
        return None
    return {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}
        }
    }


def _reserved(reservation: str, *, spot: bool | None) -> list[list[dict[str, Any]]]:
    if spot:
        raise InvalidRequestError(
            f"spot=True together with capacity_reservation={reservation!r}: reserved capacity is "
            "never spot; leave one of them out"
        )
    if reservation != BLOCK:
        return [[_expression(RESERVATION, (reservation,))]]
    return [
        [_expression(RESERVATION_TYPE, ("capacity-block",))],
        [_expression(NODE_GROUP_CAPACITY, ("CAPACITY_BLOCK",))],
    ]


def _of_market(chosen: Mapping[str, str], *, spot: bool | None) -> list[list[dict[str, Any]]]:
    named = {key: chosen[key] for key in (KARPENTER_CAPACITY, NODE_GROUP_CAPACITY) if key in chosen}
    if spot is not None and any((kind.lower() == "spot") is not spot for kind in named.values()):
        raise InvalidRequestError(
            f"spot={spot} together with node_selector={named!r}: leave one of them out"
        )
    if spot is None or named:
        return [[]]
    labels = ((KARPENTER_CAPACITY, ("spot",)), (NODE_GROUP_CAPACITY, ("SPOT",)))
    if spot:
        return [[_expression(label, values)] for label, values in labels]
    # This also allows nodes that have neither label.
    return [[_expression(label, values, "NotIn") for label, values in labels]]


def _expression(label: str, values: Sequence[str], operator: str = "In") -> dict[str, Any]:
    return {"key": label, "operator": operator, "values": list(values)}

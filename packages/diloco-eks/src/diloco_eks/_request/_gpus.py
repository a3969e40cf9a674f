"""GPUs by name: their number, and the nodes that have them, whatever made the nodes."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from diloco_protocol import InvalidRequestError
from diloco_protocol.backend import ANY, parse_gpu, shown

from ._names import check_key, check_label_value

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

_NAME = re.compile(r"[A-Za-z][\w.-]*", re.ASCII)
_MOST_GPUS = 16  # of one node, if the model is not known
Table = Mapping[str, Mapping[str, Sequence[str]]]


@dataclass(frozen=True, slots=True)
class Model:
    """A model of GPU on AWS.

    Attributes:
        name: Its name in Karpenter's and Auto Mode's label.
        products: Its names in the label of NVIDIA's GPU feature discovery.
        types: Instance type → GPUs of one node. Source: EKS user guide, "ml-workload-placement";
            EC2 instance types.
        resource: Name of the resource that counts them; None for GPUs of NVIDIA.
    """

    name: str
    products: tuple[str, ...]
    types: Mapping[str, int]
    resource: str | None = None


def _sizes(family: str, counts: Mapping[int, str]) -> dict[str, int]:
    return {f"{family}.{size}": count for count, sizes in counts.items() for size in sizes.split()}


_SMALL = {1: "xlarge 2xlarge 4xlarge 8xlarge 16xlarge", 4: "12xlarge 24xlarge", 8: "48xlarge"}
MODELS: Mapping[str, Model] = {
    "T4": Model(
        "t4",
        ("Tesla-T4",),
        _sizes("g4dn", {1: "xlarge 2xlarge 4xlarge 8xlarge 16xlarge", 4: "12xlarge", 8: "metal"}),
    ),
    "V100": Model(
        "v100",
        ("Tesla-V100-SXM2-16GB", "Tesla-V100-SXM2-32GB"),
        {"p3.2xlarge": 1, "p3.8xlarge": 4, "p3.16xlarge": 8, "p3dn.24xlarge": 8},
    ),
    "A10G": Model("a10g", ("NVIDIA-A10G",), _sizes("g5", _SMALL)),
    "L4": Model(
        "l4",
        ("NVIDIA-L4",),
        {**_sizes("g6", _SMALL), **_sizes("gr6", {1: "4xlarge 8xlarge"})},
    ),
    # Parts of an L4: an eighth to a half of its memory.
    "L4-PART": Model(
        "l4",
        (),
        {**_sizes("g6f", {1: "large xlarge 2xlarge 4xlarge"}), **_sizes("gr6f", {1: "4xlarge"})},
    ),
    "L40S": Model("l40s", ("NVIDIA-L40S",), _sizes("g6e", _SMALL)),
    "A100": Model(
        "a100",
        ("NVIDIA-A100-SXM4-40GB", "NVIDIA-A100-SXM4-80GB"),
        {"p4d.24xlarge": 8, "p4de.24xlarge": 8},
    ),
    "A100-80GB": Model("a100", ("NVIDIA-A100-SXM4-80GB",), {"p4de.24xlarge": 8}),
    "H100": Model("h100", ("NVIDIA-H100-80GB-HBM3",), {"p5.4xlarge": 1, "p5.48xlarge": 8}),
    "H200": Model("h200", ("NVIDIA-H200",), {"p5e.48xlarge": 8, "p5en.48xlarge": 8}),
    "B200": Model("b200", ("NVIDIA-B200",), {"p6-b200.48xlarge": 8}),
    "B300": Model("b300", ("NVIDIA-B300",), {"p6-b300.48xlarge": 8}),
    # The models from here on are from the vendors' documents, and were not tried on a cluster.
    "GB200": Model("gb200", ("NVIDIA-GB200",), {"p6e-gb200.36xlarge": 4}),
    "RTX-PRO-6000": Model(
        "rtx-pro-6000",
        ("NVIDIA-RTX-PRO-6000-Blackwell-Server-Edition",),
        _sizes("g7e", {1: "2xlarge 4xlarge 8xlarge", 2: "12xlarge", 4: "24xlarge", 8: "48xlarge"}),
    ),
    "TRAINIUM": Model(
        "trainium",
        (),
        {"trn1.2xlarge": 1, "trn1.32xlarge": 16, "trn1n.32xlarge": 16},
        NEURON,
    ),
    "TRAINIUM2": Model(
        "trainium2",
        (),
        {"trn2.3xlarge": 1, "trn2.48xlarge": 16, "trn2u.48xlarge": 16},
        NEURON,
    ),
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


def check_table(table: Table | None) -> dict[str, dict[str, tuple[str, ...]]]:
    """Check a caller's own table of GPUs: name → node label → values of which one must match.

    Raises:
        InvalidRequestError: The value is not such a table.
    """
    checked: dict[str, dict[str, tuple[str, ...]]] = {}
    if table is not None and not isinstance(table, Mapping):
        raise InvalidRequestError(
            f"gpu_types must map names of GPUs to node labels and their values, not {shown(table)}"
        )
    for name, places in (table or {}).items():
        if not isinstance(name, str) or not _NAME.fullmatch(name) or name.lower() == ANY:
            raise InvalidRequestError(
                f"gpu_types has the name {shown(name)}: letters, digits, '-', '_' and '.' are "
                "allowed"
            )
        called = f"gpu_types[{name!r}]"
        if not isinstance(places, Mapping) or not places:
            raise InvalidRequestError(
                f"{called} must map node labels to lists of values, not {shown(places, called)}"
            )
        for label, values in places.items():
            if (
                isinstance(values, str)
                or not isinstance(values, Collection)
                or not values
                or not all(isinstance(value, str) for value in values)
            ):
                inside = f"{called}[{shown(label)}]"
                raise InvalidRequestError(
                    f"{inside} must be a list of the label's values, not {shown(values, inside)}"
                )
            check_key(called, label)
            for value in filter(None, values):  # a label may be empty
                check_label_value(f"{called}[{label!r}]", value)
        if name.upper() in checked:
            raise InvalidRequestError(
                f"gpu_types has the name {shown(name)} twice: upper and lower case are the same"
            )
        checked[name.upper()] = {label: tuple(values) for label, values in places.items()}
    return checked


def place_gpus(text: str, table: Table | None = None) -> PlacedGpus:
    """Return the GPUs that ``gpu=`` asks for, and the nodes that have them.

    :func:`diloco_protocol.backend.parse_gpu` describes the text.

    Args:
        text: The request; names may be in upper or lower case.
        table: The caller's own table, by upper-case name; it takes precedence over the built-in
            one.

    Raises:
        InvalidRequestError: The text has another form, the name is unknown (the error lists the
            known ones), or no node has so many GPUs.
    """
    table = table or {}
    wanted = parse_gpu(text)
    name, count = wanted.name.upper(), wanted.count
    most = _MOST_GPUS
    places: Mapping[str, tuple[str, ...]] = {}
    resource = None
    if name in table:
        places = {label: tuple(values) for label, values in table[name].items()}
    elif name in MODELS:
        model = MODELS[name]
        most = max(model.types.values())
        places, resource = _places(name, model, count), model.resource
    elif wanted.name != ANY:
        known = ", ".join([*sorted({*MODELS, *table}), ANY])
        raise InvalidRequestError(
            f"gpu={text!r}: there is no GPU {wanted.name!r}; known are {known}; gpu_types= adds "
            "others"
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
    products = {FEATURE_DISCOVERY: model.products} if model.products else {}
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
